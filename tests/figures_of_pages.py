"""Which figures in the prose of a page come from nowhere: python -m tests.figures_of_pages

A figure is covered if what the page prints, code that it shows, its picture, an assertion or
another number in its program, or a fact about others (facts.toml) has it, rounded as the prose
rounds it, in the unit in which a factor of a power of ten makes it readable. So a figure of our own
cannot stay as it was when the run behind it changes. Small whole numbers are not looked at: "two
layers" needs no proof.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Any

from tutorials import build

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FACTS: list[dict[str, str]] = tomllib.loads((ROOT / "tests" / "facts.toml").read_text())["fact"]
PAGES = {path.stem: path.with_suffix(".md") for path in build.tutorials([])}
PAGES |= {name: ROOT / "tutorials" / f"{name}.md" for name in ("README", "glossary")}

NUMBER = re.compile(r"(?<![\w.#-])\d[\d,]*(?:\.\d+)?(?![\w-]*\d)")
SMALL = 12  # up to this a whole number is a word of the language rather than a figure


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def uncovered(name: str) -> list[str]:
    """Figures in the prose of this page that nothing covers."""
    page = PAGES[name].read_text()
    blocks = "\n".join(re.findall(r"^```.*?^```$", page, re.M | re.S))
    facts = " ".join(fact["says"] for fact in FACTS if fact["page"] == name)
    pictures = " ".join(p.read_text() for p in PAGES[name].parent.glob(f"{name}*.svg"))
    pictures = " ".join(re.findall(r">([^<]+)<", pictures))
    known = {float(n) for n in _numbers(f"{blocks} {facts} {pictures}")} | _literals(name)
    return [figure for figure in _numbers(_prose(page)) if not _covered(figure, known)]


def _prose(page: str) -> str:
    """A page without code, links, its frame, and the numbers of lists and pages."""
    text = page.partition("<!-- page -->")[2].partition("<!-- end of page -->")[0]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<sub>.*?</sub>|`[^`]*`|[Tt]orch \d\.\d+", "", text, flags=re.S)
    # Numbers of lines and of pages to come, which one_file.py looks up.
    text = re.sub(r"\[\d+\]\(fsdp_in_one_file\.py#L\d+\)|\| \d\d \|", "", text)
    text = re.sub(r"\[(?:\d\d|[^\]]*#\d+)\]\([^)]*\)|\]\([^)]*\)", "]", text)
    return re.sub(r"^\d\. |\bpages? \d\d\b|\b20\d\d\b", "", text, flags=re.M)


def _numbers(text: str) -> list[str]:
    found = [number.replace(",", "") for number in NUMBER.findall(text)]
    return [number for number in found if "." in number or int(number) > SMALL]


def _literals(name: str) -> set[float]:
    """Numbers that stand in the program of a page, also in its texts ("--nodes 16")."""
    found: set[float] = set()
    for node in ast.walk(ast.parse(PAGES[name].with_suffix(".py").read_text())):
        value: Any = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(value, (int, float)):
            found.add(float(value))
        elif isinstance(value, str):
            found |= {float(n) for n in re.findall(r"\d+\.?\d*", value)}  # also of "gpt-1.3b"
    return found


def _covered(figure: str, known: set[float]) -> bool:
    _, _, decimals = figure.partition(".")
    half = 0.5 * 10 ** -len(decimals) + 1e-9
    factors = (1, 1e-3, 1e-6, 1e-9, 1e3, 100)
    return any(abs(number * by - float(figure)) <= half for number in known for by in factors)


if __name__ == "__main__":
    for page in sys.argv[1:] or [name for name in PAGES if name[:2].isdigit()]:
        print(f"{page}: {', '.join(uncovered(page)) or 'all covered'}")

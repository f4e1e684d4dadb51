"""What stands around a page: the way to the others, what to write now, and how long it takes.

Minutes are not guessed. They are counted from what is on the page, by a rule:

- 150 words a minute: slower than the 238 at which adults read non-fiction on average (Brysbaert
  2019), because this is to be learned from;
- 12 seconds for a line of code, which are 300 lines an hour: reviewers are told to read 300 to 500
  (SmartBear's best practices for peer code review);
- 80 seconds for each experiment: what a program prints, a picture, a question to answer before one
  runs it.

Somebody who read all pages took 15 hours and a half where 200 words, 9 seconds and a minute gave 11
hours and 20 minutes. The three figures here are those, slowed down by that.
"""

import re
import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as in build.py
import grow
import one_file
from address import NOTEBOOKS, colab

WORDS_PER_MINUTE, SECONDS_PER_LINE, SECONDS_PER_EXPERIMENT = 150, 12, 80
OPEN, CLOSE = "<!-- page -->", "<!-- end of page -->"


def tutorials(names: list[str], folder: Path = HERE) -> list[Path]:
    """The programs of the pages of these names, or of all, in the order of their numbers."""
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    known = {path.stem for path in found}
    if not known >= {*names}:
        sys.exit(f"no such tutorial: {', '.join({*names} - known)}")
    return [path for path in found if not names or path.stem in names]


def minutes(body: str) -> int:
    """How long it takes to read what is on a page, by the rule above."""
    code = re.findall(r"^```python\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    printed = re.findall(r"^```\n.*?^```$", body, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
    lines = sum(bool(line.strip()) for block in code for line in block.splitlines())
    _, _, asked = prose.partition("## Predict, then run")
    questions = re.findall(r"^\d\. ", asked.partition("<details>")[0], re.MULTILINE)
    experiments = len(printed) + prose.count("![") + len(questions)
    seconds = len(prose.split()) / WORDS_PER_MINUTE * 60
    seconds += lines * SECONDS_PER_LINE + experiments * SECONDS_PER_EXPERIMENT
    return round(seconds / 60)


def framed(path: Path, body: str) -> str:
    """The whole text of a page, of which ``body`` says what it is about."""
    every = tutorials([], path.parent)
    place = every.index(path)
    way = []
    if place > 0:
        way.append(f"← {_link(every[place - 1])}")
    if place + 1 < len(every):
        way.append(f"{_link(every[place + 1])} →")
    about = f"[All pages](README.md) · [program of this page]({path.name}) · "
    head = f"{about}{minutes(body)} minutes"
    if path.stem in NOTEBOOKS:
        head += f" · [this page as a notebook in Colab]({colab(path.stem)})"
    foot = f"[All pages](README.md) · [glossary](glossary.md) · [program]({path.name})"
    made = f"<!-- made by tutorials/build.py from {path.name} -->"
    improves = one_file.mention(path.stem) if path.stem in one_file.lines() else ""
    parts = [
        made,
        head,
        at_a_glance(path),
        improves,
        OPEN,
        body,
        CLOSE,
        *grow.on_page(path.stem, _grown()),
        "---",
        *exercises(path.stem),
        " · ".join(way),
        foot,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _link(path: Path) -> str:
    return f"[{path.stem[:2]} {title(path)}]({path.stem}.md)"


def title(path: Path) -> str:
    """The first heading of the page that this program makes."""
    (found,) = re.findall(r"^# # (.*)$", path.read_text(), re.MULTILINE)[:1]
    return str(found)


def at_a_glance(path: Path) -> str:
    """What a page runs, which words are new on it, and what its reader can do afterwards."""
    source = path.read_text()
    ranks = sorted({*re.findall(r"@on_ranks\((\d)\)", source)})
    counts = " and ".join(filter(None, [", ".join(ranks[:-1]), *ranks[-1:]]))
    runs = [f"{counts} processes"] * bool(ranks)
    runs += ["a virtual GPU"] * ("minifsdp.sim" in source)
    glossary = (HERE / "glossary.md").read_text()
    new = re.findall(rf"^- \*\*(.+?)\*\*: .*\({path.stem}\.md\)$", glossary, re.MULTILINE)
    keys = [f"`{e['key']}`" for e in _exercises() if e["page"] == path.stem]
    says = {"Runs on": runs or ["one process"], "New": new, "Then you can write": keys}
    return " · ".join(f"{what}: {', '.join(it)}" for what, it in says.items() if it)


def exercises(stem: str) -> list[str]:
    """What the reader of a page can write now, if there is something."""
    here = [f"`{e['key']}` ({e['title']})" for e in _exercises() if e["page"] == stem]
    if not here:
        return []
    return [f"**[Now write it yourself](exercises/README.md)**: {', '.join(here)}."]


def _grown() -> dict[str, str]:
    """Of the program that grows: the step that an exercise ends with, and its key."""
    return {e["program"]: e["key"] for e in _exercises() if "program" in e}


def _exercises() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = tomllib.loads(
        (HERE / "exercises" / "exercises.toml").read_text()
    )["exercise"]
    return every


def body(path: Path) -> str:
    """What a page that is there already is about, without its frame."""
    _, _, rest = path.with_suffix(".md").read_text().partition(f"{OPEN}\n\n")
    return rest.partition(f"\n\n{CLOSE}")[0]


def with_minutes(table: str) -> str:
    """The path of the pages (README.md), with the minutes of each and their sums.

    A star beside the minutes marks the pages of the core path.
    """
    pages = [path for path in tutorials([]) if path.with_suffix(".md").exists()]
    found = {path.stem: minutes(body(path)) for path in pages}
    core = 0

    def counted(row: re.Match[str]) -> str:
        nonlocal core
        number = found.get(row[2], 0)  # 0 until it is made
        core += number if row[3] else 0
        return f"{row[1]}{number}{row[3]} | {row[4]} |"

    row = r"^(\| \*\*\[\d\d .*\]\((\w+)\.md\)\*\*.* \| )\d+( ★|) \| ([\d ]*) \|$"
    table = re.sub(row, counted, table, flags=re.MULTILINE)
    sums = (
        f"{len(found)} pages, {_hours(sum(found.values()))} in all; those with a ★, the core path, "
        f"{_hours(core)}."
    )
    return re.sub(r"(<!-- sums -->\n).*?(?=<!--)", rf"\g<1>{sums}\n", table, flags=re.DOTALL)


def _hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02} min"

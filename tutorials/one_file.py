"""Which line of fsdp_in_one_file.py a page improves, as text for it; and the file with it changed.

    # {{ one_file 09_streams }}    in a page's text: a sentence about its line
    # {{ one_file table }}         all of them

one_file.toml names the lines by what is in them. Their numbers are looked up here, so they are
right whatever is changed in that file. A page shows the head of a function, and of what is inside
of one only where it is: that is for the reader to write (exercises build.1 to build.7).
"""

from pathlib import Path
from types import ModuleType

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

import grow

HERE = Path(__file__).parent
FILE = HERE / "fsdp_in_one_file.py"


def lines() -> dict[str, dict[str, str]]:
    """The entries of one_file.toml, by page."""
    entries = tomllib.loads((HERE / "one_file.toml").read_text())["line"]
    return {entry["page"]: entry for entry in entries}


def number(text: str) -> int:
    """The number of the only line with this text.

    Raises:
        KeyError: there is none, or there are several.
    """
    found = [n for n, line in enumerate(FILE.read_text().splitlines(), 1) if text in line]
    if len(found) != 1:
        raise KeyError(f"{len(found)} lines of {FILE.name} have {text!r}; name one of them")
    return found[0]


def changed(lines: dict[str, str]) -> ModuleType:
    """The file with something else in the place of some of its text.

    Raises:
        KeyError: a text is not in it, or not in one line only.
    """
    source, module = FILE.read_text(), ModuleType(f"changed_{FILE.stem}")
    for text, instead in lines.items():
        number(text)
        source = source.replace(text, instead)
    exec(source, vars(module))
    return module


def insert(what: str) -> str:
    """What stands for ``{{ one_file what }}``: a sentence about a page's line, or the table.

    Raises:
        KeyError: one_file.toml has nothing about this page.
    """
    return table() if what == "table" else mention(what)


def mention(page: str) -> str:
    if page not in lines():
        raise KeyError(f"one_file.toml has no line that {page} improves")
    text, here = lines()[page]["text"], lines()[page]["here"]
    return (
        f"In [FSDP in one file](06_one_file.md) this is [line {number(text)}]({_link(text)}), "
        f"{_shown(text)}. On this page {here}."
    )


def _shown(text: str) -> str:
    """The text of a line, or only the name of the function that it is in."""
    inside = grow.around(FILE.read_text(), number(text))
    is_head = inside == "module" or text.startswith(("def ", "class "))
    return f"`{text}`" if is_head else f"in `{inside}`"


def table() -> str:
    rows = ["| line | | page | what that page does about it |", "| ---: | --- | --- | --- |"]
    for page, entry in sorted(lines().items(), key=lambda item: number(item[1]["text"])):
        text, name = entry["text"], page[:2]
        # Pages that are still to be written have a row, and no link.
        where = f"[{name}]({page}.md)" if (HERE / f"{page}.md").exists() else name
        shown = _shown(text)
        rows.append(f"| [{number(text)}]({_link(text)}) | {shown} | {where} | {entry['here']} |")
    return "\n".join(rows)


def _link(text: str) -> str:
    return f"{FILE.name}#L{number(text)}"

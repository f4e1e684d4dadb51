"""One program that grows: from fsdp_in_one_file.py, in small steps, to the concepts of the core.

    make steps                           # build/steps/ has them all; each is trained against DDP
    python -m tutorials.grow build OUT  # write them to a folder
    python -m tutorials.grow save OUT   # after you have edited them there: make the diffs anew

A step is a diff to the program before it, which then is whole and runs again. Above the diff stands
what it is for, and its page. A part of a diff (a *hunk*) has no line numbers. It belongs where the
lines are that it shows, which has to be one place only. So a change of the first program reaches
the last one, unless it touches what a hunk shows.
"""

import ast
import difflib
import re
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent / "steps"
FIRST = HERE.parent / "fsdp_in_one_file.py"
CONTEXT = 2  # lines around a change, at least

DIFFS = sorted(HERE.glob("*.diff"), key=lambda path: int(path.stem.partition("_")[0]))
NAMES = ["0_one_file", *(path.stem for path in DIFFS)]
"""Of the programs, in their order."""


def diff(name: str) -> str:
    """What a step changes: its hunks."""
    return _parts(name)[2]


def title(name: str) -> str:
    """What a step is for, in a sentence or two."""
    return " ".join(_parts(name)[0].split())


def page(name: str) -> str:
    """The page of a step."""
    return _parts(name)[1]


def _parts(name: str) -> tuple[str, str, str]:
    head, _, hunks = (HERE / f"{name}.diff").read_text().partition("@@ ")
    says, _, of = head.partition("Page: ")
    return says, of.strip(), f"@@ {hunks}"


@cache
def text(name: str) -> str:
    """A program, whole."""
    at = NAMES.index(name)
    return applied(text(NAMES[at - 1]), diff(name)) if at else FIRST.read_text()


def load(name: str) -> ModuleType:
    """A program, as a new module."""
    module = ModuleType(f"step_{name}")
    exec(compile(text(name), f"steps/{name}.py", "exec"), vars(module))
    return module


def size(name: str) -> int:
    """How many lines a step adds."""
    return sum(line.startswith("+") and line != "+" for line in diff(name).splitlines())


def table() -> str:
    """All steps, for a page."""
    rows = ["| step | | new lines | page |", "| --- | --- | ---: | --- |"]
    for name in NAMES[1:]:
        number = page(name)[:2]
        link = f"[{number}]({page(name)}.md#the-program-that-grows)"
        rows.append(f"| [{name}](steps/{name}.diff) | {title(name)} | {size(name)} | {link} |")
    return "\n".join(rows)


def on_page(stem: str, exercises: Mapping[str, str]) -> list[str]:
    """What stands below a page that has steps: each of them, to be opened.

    Args:
        exercises: the last step that a student writes in one -> its key.
    """
    steps = [name for name in NAMES[1:] if page(name) == stem]
    if not steps:
        return []
    parts = ["## The program that grows"]
    for name in steps:
        what = f"**Step [{name}](steps/{name}.diff)** of [one program that grows](29_steps.md). "
        later = NAMES[NAMES.index(name) :]
        key = next((exercises[step] for step in later if step in exercises), None)
        says = f"{size(name)} new lines" + f" (an answer to {key}: try it first)" * bool(key)
        parts += [what + title(name), f"<details><summary>{says}</summary>"]
        parts += [f"```diff\n{diff(name).rstrip()}\n```", "</details>"]
    return parts


def applied(source: str, changes: str) -> str:
    """A program with the changes of a diff.

    Raises:
        ValueError: the lines that a hunk shows are not there, or are there more than once.
    """
    for hunk in re.split(r"^@@ .*\n", changes, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        if (found := source.count(old)) != 1:
            raise ValueError(f"a hunk fits {found} times, and should fit once:\n{hunk}")
        source = source.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    return source


def between(old: str, new: str) -> str:
    """The diff that makes ``new`` of ``old``. Each hunk shows so much that it fits once."""
    for context in range(CONTEXT, 20):
        changes = "".join(_hunks(old, new, context))
        try:
            assert applied(old, changes) == new
        except ValueError:
            continue
        return changes
    raise ValueError("the two have too many lines that are alike")


def _hunks(old: str, new: str, context: int) -> list[str]:
    hunks = []
    lines = [text.splitlines(keepends=True) for text in (old, new)]
    for line in difflib.unified_diff(*lines, n=context):
        if line.startswith("@@"):
            first = int(re.findall(r"\+(\d+)", line)[0])
            hunks.append(f"@@ {around(new, first + context)} @@\n")
        elif not line.startswith(("---", "+++")):
            hunks.append(line)
    return hunks


def around(source: str, number: int) -> str:
    """The qualified name of what a line is in."""
    names: list[str] = []
    nodes: list[ast.stmt] = ast.parse(source).body
    while found := next((n for n in nodes if _has(n, number)), None):
        names.append(getattr(found, "name", ""))
        nodes = getattr(found, "body", [])
    return ".".join(filter(None, names)) or "module"


def _has(node: ast.stmt, number: int) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and (
        node.lineno <= number <= (node.end_lineno or 0)
    )


def build(folder: Path) -> None:
    """Write all programs to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.py").write_text(text(name))


def save(folder: Path) -> None:
    """Make the diffs, and the first program, of what is in a folder. New steps may be there."""
    paths = sorted(folder.glob("*_*.py"), key=lambda path: int(path.stem.partition("_")[0]))
    FIRST.write_text(paths[0].read_text())
    for before, after in pairwise(paths):
        changes = between(before.read_text(), after.read_text())
        path = HERE / f"{after.stem}.diff"
        head = path.read_text().partition("@@ ")[0] if path.exists() else "Page: \n\n"
        path.write_text(head + changes)


if __name__ == "__main__":
    {"build": build, "save": save}[sys.argv[1]](Path(sys.argv[2]))

"""Code of the engine on a page: by name, from where it is, and with what comes later left out. What
is an exercise's to write is folded, for readers who write it themselves.

    {{ minifsdp/core/limiter.py EventQueue.admit }}
    {{ minifsdp/core/unshard.py unshard -stats -wait_event }}

After the name each ``-text`` leaves out the statements, and the lines of comment, on whose first
line the text stands. Where something was left out the page shows ``...``, so that nobody takes the
rest for the whole, and below it says so, with a link to the file.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings this one along
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
EXERCISES = Path(__file__).parent / "exercises" / "exercises.toml"


def quoted(text: str) -> str:
    """``text`` with the code in it that ``{{ }}`` name."""

    def code(m: re.Match[str]) -> str:
        without = re.findall(r"(?<!\S)-(\S.*?)(?=\s-\S|\s*$)", m[3], re.DOTALL)
        return folded(quote(m[1], m[2], without), exercises_on(m[1], m[2]))

    pattern = r"^\{\{ (\S+) (\S+)\s(.*?)\}\}$"
    return re.sub(pattern, code, text, flags=re.MULTILINE | re.DOTALL)


def folded(code: str, keys: list[str]) -> str:
    """Code that is the answer of exercises; as it is, if there are none."""
    if not keys:
        return code
    summary = f"<summary>The code. To write it yourself first: {', '.join(keys)}</summary>"
    return f"<details>{summary}\n\n{code}\n\n</details>"


@cache
def exercises_on(file: str, name: str) -> list[str]:
    """The exercises in which something that is, or is in, ``name`` is to be written."""
    keys = []
    for exercise in tomllib.loads(EXERCISES.read_text())["exercise"]:
        of_package = f"minifsdp/{exercise.get('module', '')}.py"
        there = "tutorials/fsdp_in_one_file.py" if exercise.get("program") else of_package
        for taken in exercise.get("takes", []) if there == file else []:
            if f"{name}.".startswith(f"{taken}.") or taken.startswith(f"{name}."):
                keys.append(exercise["key"])
    return sorted({*keys})


def quote(file: str, name: str, without: list[str] | None = None) -> str:
    """The source of a function, a class or a method, and where it is from.

    Args:
        without: what to leave out, by a text on its first line.

    Raises:
        KeyError: the file has no such thing, or nothing in it that is to be left out.
    """
    source = (ROOT / file).read_text()
    found: Any = ast.parse(source)
    for part in name.split("."):
        inside = {getattr(node, "name", None): node for node in found.body}
        if part not in inside:
            raise KeyError(f"{file} has no {name}")
        found = inside[part]
    lines = source.splitlines()
    gone: set[int] = set()
    for text in without or []:
        ranges = [spot for spot in _parts(found, lines) if text in lines[spot.start - 1]]
        if not ranges:
            raise KeyError(f"{file} {name} has no statement or comment with {text!r} to leave out")
        gone.update(*ranges)
    indent = found.col_offset
    code = [line[indent:] for line in _elided(found, lines, gone)]
    where = f"`{name}` in [{file}](../{file})" + (", shortened at `...`" if gone else "")
    return "\n".join(["```python", *code, "```", f"<sub>{where}</sub>"])


def _parts(found: Any, lines: list[str]) -> Iterator[range]:
    """The lines, from 1, of each statement inside and of each comment that has a line to itself."""
    for node in ast.walk(found):
        if isinstance(node, ast.stmt) and node is not found:
            assert node.end_lineno is not None
            yield range(node.lineno, node.end_lineno + 1)
    for number in range(found.lineno, found.end_lineno + 1):
        if lines[number - 1].lstrip().startswith("#"):
            yield range(number, number + 1)


def _elided(found: Any, lines: list[str], gone: set[int]) -> Iterator[str]:
    """The lines of ``found``; one ``...`` for those that are ``gone`` and follow each other."""
    for number in range(found.lineno, found.end_lineno + 1):
        line = lines[number - 1]
        if number not in gone:
            yield line
        elif number - 1 not in gone:
            yield line[: len(line) - len(line.lstrip())] + "..."

"""Draws grade.svg, the README's picture: what `make grade` prints of a folder that is half done."""

import ast
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch

from tutorials.exercises.catalog import HERE, exercises, wrong_solutions
from tutorials.exercises.grade import grade
from tutorials.exercises.report import table
from tutorials.exercises.student import make

SHOWN = ("flatten", "shard", "unshard", "reshard", "reduce", "limiter")
RIGHT = ("core/flatten", "core/shard", "core/unshard", "core/reshard")
WRONG = ("it was summed, not averaged", "waits for the event")  # by what the grader says of them
KINDS = {"✓": "right", "✗": "wrong", "·": "open"}
STYLE = """<style>
.ground { fill: #f6f8fa; stroke: #d0d7de; } text { fill: #24292f; }
.more { fill: #57606a; }
.right { fill: #1a7f37; } .wrong { fill: #cf222e; } .open { fill: #6e7781; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #151b23; stroke: #3d444d; } text { fill: #d1d9e0; }
  .more { fill: #9198a1; }
  .right { fill: #3fb950; } .wrong { fill: #ff7b72; } .open { fill: #9198a1; }
}
</style>"""
HEIGHT, CHARACTER = 19, 8.05  # of a line and of a character, in pixels


def graded(folder: Path) -> str:
    """The table of a folder in which some exercises are right, two wrong, and some to be done."""
    make(folder)
    for exercise in exercises().values():
        if exercise.module in RIGHT:
            (folder / exercise.file).write_text(exercise.reference)
    for wrong in wrong_solutions():
        exercise = exercises()[wrong.exercise]
        if exercise.track == 2 and wrong.says in WRONG:
            start = (folder / exercise.file).read_text()
            text = exercise.reference.replace(wrong.original, wrong.replacement)
            assert start != text
            (folder / exercise.file).write_text(_todo_after(exercise.takes, text, start))
    shown = [e for e in exercises().values() if e.key.partition(".")[0] in SHOWN]
    return table(grade(folder, shown))


def _todo_after(names: Sequence[str], text: str, start: str) -> str:
    """``start``, with the definitions of ``names`` from ``text``."""
    found = {getattr(node, "name", ""): node for node in ast.parse(text).body}
    written = [ast.get_source_segment(text, found[name]) or "" for name in names]
    return "\n\n".join([start, *written]) + "\n"


def svg(text: str) -> str:
    """A terminal's window with some lines of text."""
    lines = ["$ make grade DIR=~/my-fsdp", *text.splitlines()]
    width = round(CHARACTER * max(map(len, lines)) + 40)
    height = HEIGHT * len(lines) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13.4">',
        STYLE,
        f'<rect width="{width}" height="{height}" rx="8" class="ground"/>',
    ]
    for i, line in enumerate(lines):
        sign, rest = (line[:1], " " + line[1:]) if line[:1] in KINDS else ("", line)
        common = f'y="{30 + HEIGHT * i}" xml:space="preserve"'
        if sign:
            parts.append(
                f'<text x="20" {common} class="{KINDS[sign]}" font-weight="bold">{sign}</text>'
            )
        kind = ' class="more"' if line[:1] == " " else ""
        parts.append(f'<text x="20" {common}{kind}>{escape(rest)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw() -> str:
    """The picture as it should be now."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return svg(graded(Path(folder).resolve()))


if __name__ == "__main__":
    (HERE / "grade.svg").write_text(draw())

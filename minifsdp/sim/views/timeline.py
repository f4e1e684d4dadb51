"""Pictures of a step: who was busy when (lanes.py), and below that the memory (memory_plot.py).

Several steps are drawn on the same axes: one below the other, or as a table of small ones.
"""

from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Entry
from minifsdp.sim.views.lanes import Axis, Lanes
from minifsdp.sim.views.memory_plot import draw_memory, most_reserved
from minifsdp.sim.views.svg import UNITS, WIDTH, Drawing

LEFT, RIGHT, SMALL = 70, 12, 20


def svg(steps: dict[str, list[Entry]], part: float = 1.0) -> str:
    """The last step of each tape as an SVG: one below the other, on the same axes, each under its
    title.

    Args:
        part: of each step, from its beginning: half of it is drawn twice as wide.
    """
    drawing = Drawing("; ".join(steps))
    shown = {
        title: (entries, start, (1 - part) * start + part * end)
        for title, (entries, start, end) in ((t, last_step(tape)) for t, tape in steps.items())
    }
    scale = (WIDTH - LEFT - RIGHT) / _longest([*shown.values()])
    most = max((most_reserved(tape) for tape, *_ in shown.values()), default=0) or 1
    axes = {title: Axis(LEFT, start, end, scale) for title, (_, start, end) in shown.items()}
    lanes = {title: Lanes(tape, axes[title]) for title, (tape, *_) in shown.items()}
    _legend(drawing, list(lanes.values()))
    for title, (tape, *_) in shown.items():
        drawing.text(LEFT, drawing.bottom + 24, title, "title")
        lanes[title].draw(drawing, drawing.bottom + 6)
        draw_memory(drawing, tape, axes[title], most)
    return str(drawing)


def table(title: str, rows: dict[str, dict[str, tuple[list[Entry], str]]]) -> str:
    """The last step of each tape, small and without its memory, in rows and columns.

    Args:
        rows: by the name of a row, then by that of a column: a tape, and a line about it. All rows
            have the same columns.
    """
    drawing = Drawing(title)
    cells = [cell for row in rows.values() for cell in row.values()]
    shown = [last_step(tape) for tape, _ in cells]
    columns = len(next(iter(rows.values())))
    width = (WIDTH - RIGHT) / columns
    scale = (width - LEFT - RIGHT) / _longest(shown)
    lanes = [
        Lanes(tape, Axis(i % columns * width + LEFT, start, end, scale), SMALL)
        for i, (tape, start, end) in enumerate(shown)
    ]
    drawing.text(RIGHT, 20, title, "title")
    _legend(drawing, lanes)
    for at, (name, row) in enumerate(rows.items()):
        top = drawing.bottom + 22
        for column, (above, (_, line)) in enumerate(row.items()):
            left = column * width + LEFT
            drawing.text(left, top, f"{name}, {above}", "title")
            drawing.text(left, top + 17, line)
            lanes[at * columns + column].draw(drawing, top + 22)
    return str(drawing)


def _longest(steps: list[tuple[list[Entry], float, float]]) -> float:
    """Seconds, as `last_step` says where each begins and ends."""
    return max((end - start for _, start, end in steps), default=0.0) or 1.0


def _legend(drawing: Drawing, lanes: list[Lanes]) -> None:
    """Above all steps: what the colours are that stand in any of them."""
    numbers = {span.number for one in lanes for span in one.spans if span.number >= 0}
    names = {f"unit{i}": "" for i in range(min(len(numbers), len(UNITS)))}
    if names:
        names[list(names)[-1]] = "units: a colour for each, in turn" if len(names) > 1 else "a unit"
    for one in lanes:
        names |= one.legend()
    drawing.legend(LEFT, names)

"""The memory of a step, as a picture: three areas, one before the other, and how high each gets.

Memory is drawn where the host is, which takes and frees it and may be ahead of the device.
"""

import math
from collections.abc import Iterator

from minifsdp.sim.tape import Entry, Memory
from minifsdp.sim.views.lanes import Axis
from minifsdp.sim.views.svg import Drawing

PLOT = 96  # pixels, for the most memory of all steps of a picture
LEVELS = {"reserved": "lightgray", "active": "lightgreen", "allocated": "green"}
"""From the largest, which is behind, to the smallest."""


def most_reserved(tape: list[Entry]) -> int:
    """Bytes at the peak of a step; 0 if it took none."""
    return max((entry.reserved for entry in _changes(tape)), default=0)


def draw_memory(drawing: Drawing, tape: list[Entry], axis: Axis, most: int) -> None:
    """Below all that is there.

    Args:
        tape: of this step, as `last_step` has cut it out.
        most: bytes that are ``PLOT`` pixels high.
    """
    peaks = {level: 0 for level in LEVELS}
    for entry in _changes(tape):
        for level in LEVELS:
            peaks[level] = max(peaks[level], getattr(entry, level))
    words = {LEVELS[level]: f"{level}, at most {human(size)} ▾" for level, size in peaks.items()}
    heading = drawing.bottom + 8
    drawing.legend(axis.left, words)
    drawing.text(axis.left - 8, heading + 10, "memory", "lane")
    floor = heading + 22 + max(PLOT * peaks["reserved"] / most, 16)
    for level, colour in LEVELS.items():
        _area(drawing, tape, axis, level, colour, PLOT / most, floor)
    step = 2.0 ** math.ceil(math.log2(most / 4))
    for count in range(int(peaks["reserved"] / step) + 1):
        y = round(floor - PLOT * count * step / most, 1)
        drawing.text(axis.left - 8, y + 4, human(count * step), "lane")
        drawing.path(f"M{axis.left - 4:g} {y:g}H{axis.left:g}", "line")
    drawing.path(f"M{axis.left:g} {floor:g}H{axis.right:.1f}", "line")
    drawing.reach(floor + 12)


def _area(
    drawing: Drawing, tape: list[Entry], axis: Axis, level: str, colour: str, scale: float,
    floor: float,
) -> None:  # fmt: skip
    """One level over time, in columns half a pixel wide, and a mark where it is highest first."""
    columns: dict[float, list[int]] = {}
    for entry in (change for change in _changes(tape) if change.time <= axis.end):
        column = round(axis.x(entry.time) * 2) / 2
        columns.setdefault(column, []).append(getattr(entry, level))
    if not columns:
        return
    last, path = None, ""
    for column, sizes in columns.items():
        # A peak is drawn however short it was, and then what is there at the column's end.
        for x, size in ((column, max(sizes)), (column + 0.5, sizes[-1])):
            y = floor - scale * size
            if y != last:
                path += f"{'H' if path else 'M'}{x:g}{'V' if path else ' '}{y:.1f}"
                last = y
    drawing.path(path + f"H{axis.right:.1f}V{floor:g}H{min(columns):g}Z", colour)
    peak = max(columns, key=lambda column: max(columns[column]))
    drawing.path(f"M{peak:g} {floor - scale * max(columns[peak]):.1f}l-4 -6h8Z", "peak")


def _changes(tape: list[Entry]) -> Iterator[Memory]:
    return (entry for entry in tape if isinstance(entry, Memory))


def human(size: float) -> str:
    """Bytes in words."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.{int(size < 10 * unit and size % unit > 0)}f} {name}"
    return f"{size:.0f} B" if size else "0"

r"""Pictures of a step: who was busy when, and what memory it took.

::

    host     launches; where it has to wait it is marked, and so is who made it wait
    compute  |0 |1 |2 |3 |3 |2 |1 |0 |         by unit: forward, then backward
    unshard  |0|1|2|3|  |2|1|0|                all-gathers
    reduce                |3 |2 |1 |0 |        reduce-scatters
    memory   ___/---\___                       reserved, active, allocated, on the same axis
"""

import math
from collections.abc import Iterator

from minifsdp.sim.report import last_step
from minifsdp.sim.spans import LIMITER, STALL, Span, spans
from minifsdp.sim.svg import WIDTH, Drawing
from minifsdp.sim.tape import COMPUTE, HOST, STREAMS, Entry, Memory

LEFT, RIGHT, LANE, PLOT = 66, 12, 26, 96
MEMORY = {"reserved": "lightgray", "active": "lightgreen", "allocated": "green"}


def svg(steps: dict[str, list[Entry]]) -> str:
    """The last step of each tape as an SVG: one below the other, on the same axes, each under its
    title."""
    drawing = Drawing("; ".join(steps))
    shown = {title: last_step(tape) for title, tape in steps.items()}
    seconds = max((end - start for _, start, end in shown.values()), default=0.0) or 1.0
    most = max((m.reserved for tape, *_ in shown.values() for m in _levels(tape)), default=0) or 1
    names = {"blue": "compute, by unit", "purple": "communication"}
    for title, (tape, start, end) in shown.items():
        panel = _Panel(drawing, tape, (start, end), seconds, most)
        panel.draw(title)
        names |= panel.waits
    drawing.legend(LEFT, names | {colour: name for name, colour in MEMORY.items()})
    return str(drawing)


def _levels(tape: list[Entry]) -> Iterator[Memory]:
    return (entry for entry in tape if isinstance(entry, Memory))


class _Panel:
    """One step. ``seconds`` are as wide as there is room, ``most`` bytes as high."""

    def __init__(
        self, drawing: Drawing, tape: list[Entry], step: tuple[float, float], seconds: float,
        most: int,
    ) -> None:  # fmt: skip
        self._drawing, self._entries, (self._start, self._end) = drawing, tape, step
        self._spans = [s for s in spans(tape) if s.end > self._start < self._end > s.start]
        self._lanes = [HOST, *(s for s in STREAMS if any(span.lane == s for span in self._spans))]
        self._scale, self._most = (WIDTH - LEFT - RIGHT) / seconds, most
        self._top = drawing.bottom + 30
        self._floor = self._top + LANE * len(self._lanes) + 24 + PLOT
        self.waits = {
            kind: words
            for name, kind, words in (
                (LIMITER, "orange", "host waits for the limiter"),
                (STALL, "amber", "host waits"),
            )
            if any(span.name == name for span in self._spans if span.lane == HOST)
        }

    def draw(self, title: str) -> None:
        self._drawing.text(LEFT, self._top - 12, title, "title")
        for row, lane in enumerate(self._lanes):
            self._lane(lane, self._top + row * LANE)
        self._memory()
        for at in _ticks(self._end - self._start):
            x = round(self._x(self._start + at), 1)
            if x < WIDTH - 20:  # else there is no room for the words
                self._drawing.text(x, self._floor - PLOT - 10, f"{at * 1e3:g} ms", "tick")

    def _x(self, time: float) -> float:
        return LEFT + (min(max(time, self._start), self._end) - self._start) * self._scale

    def _lane(self, lane: str, y: float) -> None:
        right = self._x(self._end)
        self._drawing.text(LEFT - 8, y + 16, lane, "lane")
        self._drawing.path(f"M{LEFT} {y + LANE - 3:g}H{right:.1f}", "line")
        if lane == HOST:
            self._drawing.box(LEFT, y + 9, right - LEFT, 5, "gray", tip="launching")
        for span in self._spans:
            if span.lane == lane:
                left = self._x(span.start)
                width = max(self._x(span.end) - left, 0.6)
                words = span.name if lane != HOST else ""
                tip = f"{span.name or lane}: {(span.end - span.start) * 1e3:.3g} ms"
                self._drawing.box(left, y + 3, width, LANE - 7, _kind(span), words, tip)

    def _memory(self) -> None:
        """Three areas, the largest behind."""
        columns: dict[float, list[Memory]] = {}  # half a pixel wide
        for entry in _levels(self._entries):
            columns.setdefault(round(self._x(entry.time) * 2) / 2, []).append(entry)
        right, floor = self._x(self._end), self._floor
        for level, colour in MEMORY.items():
            last, path = None, ""
            for column, memory in columns.items():
                heights = [floor - PLOT * getattr(m, level) / self._most for m in memory]
                for x, y in ((column, min(heights)), (column + 0.5, heights[-1])):
                    if y != last:
                        path += f"{'H' if path else 'M'}{x:g}{'V' if path else ' '}{y:.1f}"
                        last = y
            if path:
                path += f"H{right:.1f}V{floor:g}H{min(columns):g}Z"
                self._drawing.path(path, colour)
        peak = max((m.reserved for memory in columns.values() for m in memory), default=0)
        y = floor - PLOT * peak / self._most
        self._drawing.text(LEFT + 4, round(y + 12, 1), f"{_human(peak)} reserved")
        self._drawing.path(f"M{LEFT} {floor:g}H{right:.1f}", "line")
        self._drawing.reach(floor + 12)


def _kind(span: Span) -> str:
    if span.lane == HOST:
        return "orange" if span.name == LIMITER else "amber"
    colour = "blue" if span.lane == COMPUTE else "purple"
    return f"light{colour}" if span.number % 2 else colour  # neighbours can be told apart


def _ticks(seconds: float) -> Iterator[float]:
    """Round times, five to ten of them."""
    if seconds <= 0:
        return
    decade = 10.0 ** math.floor(math.log10(seconds))
    step = next(decade / cut for cut in (1, 2, 5, 10) if seconds >= 5 * decade / cut)
    for count in range(int(seconds / step) + 1):
        yield count * step


def _human(size: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.{int(size < 10 * unit)}f} {name}"
    return f"{size:.0f} B"

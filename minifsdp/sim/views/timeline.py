r"""Pictures of a step: who was busy when, and what memory it took.

::

             forward         | backward        | optimizer
    host     launches; where it has to wait it is marked, and so is who made it wait
    compute  |0 |1 |2 |3 |3 |2 |1 |0 |         by unit: forward, then backward
    unshard  |0|1|2|3|  |2|1|0|                all-gathers
    reduce                |3 |2 |1 |0 |        reduce-scatters
             0 ms     5 ms     10 ms
    8 GiB    ___/---\___                       reserved, active, allocated, on the same axis

Work and phases are where the device is; memory is where the host is, which may be ahead of it.
"""

import math
from collections.abc import Iterator

from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import COMPUTE, HOST, STREAMS, Entry, Memory, Phase
from minifsdp.sim.views.spans import LIMITER, OPTIMIZER, Span, spans
from minifsdp.sim.views.svg import WIDTH, Drawing, room

LEFT, RIGHT, LANE, STRIP, AXIS, PLOT = 66, 12, 26, 18, 24, 96
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
        names |= panel.names
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
        self._phases = [entry for entry in tape if isinstance(entry, Phase)]
        self._title = drawing.bottom + 18
        self._top = self._title + 12 + STRIP * bool(self._phases)
        reserved = max((m.reserved for m in _levels(tape)), default=0)
        plot = max(PLOT * reserved / most, 16)
        self._axis = self._top + LANE * len(self._lanes)
        self._reserved, self._floor = reserved, self._axis + AXIS + plot
        kinds = {_kind(span): span for span in self._spans}
        self.names = {
            kind: words
            for kind, words in (
                ("teal", "optimizer"),
                ("orange", "host waits for the limiter"),
                ("amber", "host waits"),
            )
            if kind in kinds
        }

    def draw(self, title: str) -> None:
        self._drawing.text(LEFT, self._title, title, "title")
        self._times()
        for row, lane in enumerate(self._lanes):
            self._lane(lane, self._top + row * LANE)
        self._sizes()
        self._memory()
        self._strip()

    def _strip(self) -> None:
        """Where each phase begins, and its name: behind that, or before if it is too far right."""
        for phase in self._phases:
            x, y = round(self._x(phase.time), 1), self._top - STRIP
            self._drawing.path(f"M{x:g} {y:g}V{self._axis:g}", "border")
            fits = x + 6 * len(phase.name) < WIDTH - 4
            self._drawing.text(x + (4 if fits else -4), y + 11, phase.name, "" if fits else "lane")

    def _times(self) -> None:
        """The axis of time, with lines up through the lanes."""
        for at in _ticks(self._end - self._start):
            x = round(self._x(self._start + at), 1)
            self._drawing.path(f"M{x:g} {self._top:g}V{self._axis + 4:g}", "grid")
            if x < WIDTH - 20:  # else there is no room for the words
                self._drawing.text(x, self._axis + 16, f"{at * 1e3:g} ms", "tick")

    def _sizes(self) -> None:
        """The axis of memory."""
        step = 2.0 ** math.ceil(math.log2(self._most / 4))
        for count in range(int(self._reserved / step) + 1):
            y = round(self._floor - PLOT * count * step / self._most, 1)
            self._drawing.text(LEFT - 8, y + 4, _human(count * step), "lane")
            self._drawing.path(f"M{LEFT - 4:g} {y:g}H{LEFT}", "line")

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
                if width <= room(words):
                    words = words.rpartition(".")[2]  # of blocks.3 the 3
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
        top = floor - PLOT * self._reserved / self._most
        self._drawing.text(LEFT + 4, round(top + 12, 1), f"{_human(self._reserved)} reserved")
        self._drawing.path(f"M{LEFT} {floor:g}H{right:.1f}", "line")
        self._drawing.reach(floor + 12)


def _kind(span: Span) -> str:
    if span.lane == HOST:
        return "orange" if span.name == LIMITER else "amber"
    if span.name == OPTIMIZER:
        return "teal"
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
            return f"{size / unit:.{int(size < 10 * unit and size % unit > 0)}f} {name}"
    return f"{size:.0f} B" if size else "0"

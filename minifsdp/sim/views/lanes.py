r"""Who was busy when, as a picture: a lane for the host and one for each stream.

::

             forward         | backward           where they begin on the compute stream
    host     |0 |1 ====|2 ====|3                  | launches a gather; ==== has to wait
    unshard    \0\1\    \2                        gathers, each at the end of a thread from where
    compute      |0 |1 | |2 |                     the host has launched it
    reduce                                        reductions
             0 ms     5 ms     10 ms

A unit has one colour in all lanes. Work is where the device does it, and not where it is launched.
Where units would be stripes of a few pixels they are drawn together: a box says how many it is.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from minifsdp.sim.figures.report import ALL_GATHER
from minifsdp.sim.tape import HOST, STREAMS, Entry, Phase
from minifsdp.sim.views.spans import LIMITER, OPTIMIZER, Span, spans, turns
from minifsdp.sim.views.svg import Drawing, of_unit, room

LANE, STRIP, GAP = 26, 18, 14
GATHERS = "unshard"
ORDER = (HOST, "upload", GATHERS, "compute", "reduce", "replicate", "download")
"""From top to bottom: gathers are below the host, so that the threads from there cross nothing."""
assert {HOST, *STREAMS} == {*ORDER}

WAITS = {
    "orange": "host waits for the limiter",
    "amber": "host waits for the GPU",
    "gray": "host launches",
}
WORK = {
    "optimizer": "optimizer",
    "nobody": "loss, or no unit's",
    "several": "units, together where they are narrow",
}
NARROW, CLOSE = 5, 8  # pixels: of boxes that are stripes, and of a gap that they are joined over
SEVERAL = -2
"""The number of a span that is several units'."""


@dataclass(frozen=True)
class Axis:
    """Of time: a step from ``start`` to ``end``, in seconds, from the pixel ``left`` on."""

    left: float
    start: float
    end: float
    scale: float  # pixels for a second

    def x(self, time: float) -> float:
        """Where a time is. Times before and after the step are at its ends."""
        return self.left + (min(max(time, self.start), self.end) - self.start) * self.scale

    @property
    def right(self) -> float:
        return self.x(self.end)


class Lanes:
    """The lanes of one step.

    Args:
        tape: of this step, as `last_step` has cut it out.
        height: of a lane, in pixels.
    """

    def __init__(self, tape: list[Entry], axis: Axis, height: float = LANE) -> None:
        self._axis, self._height = axis, height
        self.spans = [s for s in spans(tape) if s.end > axis.start < axis.end > s.start]
        self._together = _narrow(self.spans, axis)
        if self._together:
            self.spans = [*_joined(self.spans, CLOSE / axis.scale)]
        self._names = [n for n in ORDER if n == HOST or any(s.lane == n for s in self.spans)]
        self._gathers = [
            (o, u) for o, u in turns(tape) if (o.name, o.stream) == (ALL_GATHER, GATHERS)
        ]
        self._phases = [e for e in tape if isinstance(e, Phase) and e.time <= axis.end]

    def legend(self) -> dict[str, str]:
        """What the colours that are there mean, but for those of units."""
        kinds = {_kind(span) for span in self.spans}
        named = WAITS | WORK
        return {kind: named[kind] for kind in named if kind in kinds or kind == "gray"}

    def draw(self, drawing: Drawing, top: float) -> None:
        """All of them below ``top``, and the axis of time below them."""
        top += STRIP * bool(self._phases)
        gap = GAP * (GATHERS in self._names)  # below the host, for the threads
        rows = {n: top + i * self._height + gap * (i > 0) for i, n in enumerate(self._names)}
        bottom = top + self._height * len(rows) + gap
        for name, y in rows.items():
            self._lane(drawing, name, y)
        for phase in self._phases:
            self._phase(drawing, phase, top, bottom)
        if GATHERS in rows:
            self._launches(drawing, rows[HOST], rows[GATHERS])
        self._times(drawing, top, bottom)

    def _lane(self, drawing: Drawing, name: str, y: float) -> None:
        axis, height = self._axis, self._height
        drawing.text(axis.left - 8, y + height / 2 + 4, name, "lane")
        drawing.path(f"M{axis.left:g} {y + height - 2:g}H{axis.right:.1f}", "line")
        if name == HOST:
            drawing.box(
                axis.left, y + height / 2 - 4, axis.right - axis.left, 5, "gray", tip="host"
            )
        for span in self.spans:
            if span.lane == name:
                left = axis.x(span.start)
                width = max(axis.x(span.end) - left, 0.6)
                words = span.name if name != HOST else ""
                if width <= room(words):
                    words = words.rpartition(".")[2]  # of blocks.3 the 3
                tip = f"{span.name or name}: {(span.end - span.start) * 1e3:.3g} ms"
                drawing.box(left, y + 3, width, height - 7, _kind(span), words, tip)

    def _launches(self, drawing: Drawing, host: float, gathers: float) -> None:
        """A tick on the host's lane where each gather is launched, and a thread to where it runs.

        What was launched before this step has none. Of units that are drawn together, only the
        first and the last have one."""
        if self._together:
            self._few_launches(drawing, host, gathers)
            return
        numbers = {span.name: span.number for span in self.spans}
        for op, unit in self._gathers:
            if self._axis.start <= op.launched <= self._axis.end and unit in numbers:
                at, colour = self._axis.x(op.launched), of_unit(numbers[unit])
                end = host + self._height - 2
                drawing.path(f"M{at:.1f} {host + 1:g}V{end:g}", colour.replace("unit", "launch"))
                drawing.path(
                    f"M{at:.1f} {end:g}L{self._axis.x(op.start):.1f} {gathers + 3:g}",
                    colour.replace("unit", "thread"),
                )

    def _few_launches(self, drawing: Drawing, host: float, gathers: float) -> None:
        for span in self.spans:
            if span.lane == GATHERS:
                its = [op for op, _ in self._gathers if span.start <= op.start <= span.end]
                for op, at in ((its[0], span.start), (its[-1], its[-1].start)) if its else ():
                    drawing.path(
                        f"M{self._axis.x(op.launched):.1f} {host + self._height - 2:g}"
                        f"L{self._axis.x(at):.1f} {gathers + 3:g}",
                        "threads",
                    )

    def _phase(self, drawing: Drawing, phase: Phase, top: float, bottom: float) -> None:
        """Where a phase begins, and its name: behind that, or before if it is too far right."""
        x = round(self._axis.x(phase.time), 1)
        drawing.path(f"M{x:g} {top - STRIP:g}V{bottom:g}", "border")
        fits = x + 7 * len(phase.name) < self._axis.right + 8
        words = x + (4 if fits else -4)
        drawing.text(words, top - 6, phase.name, "" if fits else "lane")

    def _times(self, drawing: Drawing, top: float, bottom: float) -> None:
        """The axis of time, with lines up through the lanes."""
        axis = self._axis
        for at in ticks(axis.end - axis.start, 75 / axis.scale):
            x = round(axis.x(axis.start + at), 1)
            drawing.path(f"M{x:g} {top:g}V{bottom + 4:g}", "grid")
            if x < axis.right - 8:  # else there is no room for the words
                drawing.text(x, bottom + 17, f"{at * 1e3:g} ms", "tick")
        drawing.reach(bottom + 20)


def ticks(seconds: float, apart: float) -> Iterator[float]:
    """Round times, at least ``apart`` seconds from each other."""
    decade = 10.0 ** math.floor(math.log10(apart))
    step = next(decade * times for times in (1, 2, 5, 10) if decade * times >= apart * (1 - 1e-9))
    for count in range(int(seconds / step) + 1):
        yield count * step


def _narrow(found: list[Span], axis: Axis) -> bool:
    """Whether in each lane half of the units' work, or more, is in boxes that are stripes."""
    lanes: dict[str, list[float]] = {}
    for span in found:
        if span.number >= 0:
            lanes.setdefault(span.lane, []).append((span.end - span.start) * axis.scale)
    return bool(lanes) and all(sorted(its)[len(its) // 2] < NARROW for its in lanes.values())


def _joined(found: list[Span], close: float) -> Iterator[Span]:
    """Each lane's spans; those of units, and waits of the same kind, as one where there is less
    than ``close`` seconds between them."""
    for lane in ORDER:
        group: list[Span] = []
        for span in sorted((s for s in found if s.lane == lane), key=lambda span: span.start):
            if group and (span.start - group[-1].end >= close or _whose(span) != _whose(group[0])):
                yield _as_one(group)
                group = []
            group.append(span)
        if group:
            yield _as_one(group)


def _whose(span: Span) -> str:
    return span.name if span.number < 0 else "units"


def _as_one(group: list[Span]) -> Span:
    whole = group[0]._replace(end=group[-1].end)
    if whole.number < 0:
        return whole
    units = {span.name for span in group}
    return whole._replace(
        name=f"{len(units)} units" if len(units) > 1 else whole.name, number=SEVERAL
    )


def _kind(span: Span) -> str:
    if span.lane == HOST:
        return "orange" if span.name == LIMITER else "amber"
    if span.number == SEVERAL:
        return "several"
    return "optimizer" if span.name == OPTIMIZER else of_unit(span.number)

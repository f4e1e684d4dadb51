r"""Pictures of a step: who was busy when, and what memory it took.

::

    host     launches; where it has to wait it is marked, and so is who made it wait
    compute  |0 |1 |2 |3 |3 |2 |1 |0 |         by unit: forward, then backward
    unshard  |0|1|2|3|  |2|1|0|                all-gathers
    reduce                |3 |2 |1 |0 |        reduce-scatters
    memory   ___/---\___                       reserved, active, allocated, on the same axis

An SVG that is read at the width of a README, on light and on dark ground; or text for a terminal.
"""

import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from minifsdp.sim.report import last_step
from minifsdp.sim.tape import COMPUTE, HOST, STREAMS, Entry, Memory, Op, Wait

WIDTH, LEFT, RIGHT, LANE, PLOT = 860, 66, 12, 26, 96
LIMITER, STALL = "limiter", "host waits"


class Span(NamedTuple):
    """Something in a lane."""

    lane: str
    start: float
    end: float
    name: str  # of the unit, or who makes the host wait
    number: int  # of the unit, in the order of their first gather; -1: none


def spans(entries: list[Entry]) -> list[Span]:
    """What there is to draw: work on the streams, together where it is the same unit's and without
    a gap, and the host's waits."""
    numbers: dict[str, int] = {}
    found: list[Span] = []
    open_: dict[str, Span] = {}
    for entry in entries:
        if isinstance(entry, Wait) and entry.waiter == HOST and entry.until > entry.launched:
            name = LIMITER if entry.by_limiter else STALL
            found.append(Span(HOST, entry.launched, entry.until, name, -1))
        elif isinstance(entry, Op) and entry.stream != HOST:
            unit = _unit(entry)
            last = open_.get(entry.stream)
            if not unit and last is not None:
                unit = last.name  # between two uses of a unit's parameters it is still its turn
            number = numbers.setdefault(unit, len(numbers)) if unit else -1
            if last is not None and last.name == unit and entry.start - last.end < 2e-5:
                open_[entry.stream] = last._replace(end=entry.end)
                continue
            if last is not None:
                found.append(last)
            open_[entry.stream] = Span(entry.stream, entry.start, entry.end, unit, number)
    return [*found, *open_.values()]


def _unit(op: Op) -> str:
    """Whose work it is: what the engine says, or else whose parameters are read."""
    labels = [op.label, *(buffer.label for buffer in op.reads)]
    return next((label.split(" ", 1)[1] for label in labels if " " in label), "").strip("'")


def svg(steps: dict[str, list[Entry]]) -> str:
    """The last step of each tape as an SVG, :data:`WIDTH` pixels wide: one below the other, on the
    same axes, each under its title."""
    ends = [end - start for _, start, end in map(last_step, steps.values())]
    most = max(
        (e.reserved for tape in steps.values() for e in tape if isinstance(e, Memory)), default=0
    )
    parts: list[str] = []
    top, waits = 0.0, set[str]()
    for title, tape in steps.items():
        panel = _Panel(tape, max(ends, default=0.0) or 1.0, most or 1, top)
        parts += panel.draw(title)
        top, waits = panel.bottom, waits | panel.waits
    height = top + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img" '
            f'aria-label="{escape("; ".join(steps), quote=True)}">',
            _STYLE,
            *parts,
            *_legend(waits, height),
            "</svg>\n",
        ]
    )


class _Panel:
    """One step. ``seconds`` are as wide as there is room, ``most`` bytes as high."""

    def __init__(self, tape: list[Entry], seconds: float, most: int, top: float) -> None:
        self._entries, self._start, self._end = last_step(tape)
        self._spans = [
            span for span in spans(self._entries) if span.end > self._start < self._end > span.start
        ]
        self._lanes = [HOST, *(s for s in STREAMS if any(span.lane == s for span in self._spans))]
        self._scale, self._most, self._top = (WIDTH - LEFT - RIGHT) / seconds, most, top + 30
        self._memory = self._top + LANE * len(self._lanes) + 24
        self.bottom = self._memory + PLOT + 12
        self.waits = {span.name for span in self._spans if span.lane == HOST}

    def draw(self, title: str) -> Iterator[str]:
        yield f'<text x="{LEFT}" y="{self._top - 12:g}" class="title">{escape(title)}</text>'
        for row, lane in enumerate(self._lanes):
            yield from self._lane(lane, self._top + row * LANE)
        yield from self._levels()
        for at in _ticks(self._end - self._start):
            x = self._x(self._start + at)
            yield f'<text x="{x:.1f}" y="{self._memory - 10:g}" class="tick">{at * 1e3:g} ms</text>'

    def _x(self, time: float) -> float:
        return LEFT + (min(max(time, self._start), self._end) - self._start) * self._scale

    def _lane(self, lane: str, y: float) -> Iterator[str]:
        right = self._x(self._end)
        yield f'<text x="{LEFT - 8}" y="{y + 16:g}" class="lane">{lane}</text>'
        yield f'<path d="M{LEFT} {y + LANE - 3:g}H{right:.1f}" class="line"/>'
        if lane == HOST:
            yield _rect(LEFT, y + 9, right - LEFT, 5, "host", "launching")
        for span in self._spans:
            if span.lane == lane:
                left = self._x(span.start)
                width = max(self._x(span.end) - left, 0.6)
                yield _rect(left, y + 3, width, LANE - 7, _kind(span), _tip(span))
                if span.lane != HOST and width > 7 * len(span.name) + 4 and span.name:
                    yield (
                        f'<text x="{left + width / 2:.1f}" y="{y + 16:g}" class="unit">'
                        f"{escape(span.name)}</text>"
                    )

    def _levels(self) -> Iterator[str]:
        """Memory: three areas, the largest behind."""
        columns: dict[float, list[Memory]] = {}  # half a pixel wide
        for entry in self._entries:
            if isinstance(entry, Memory):
                columns.setdefault(round(self._x(entry.time) * 2) / 2, []).append(entry)
        right, floor = self._x(self._end), self._memory + PLOT
        for kind in ("reserved", "active", "allocated"):
            last, path = None, ""
            for column, memory in columns.items():
                levels = [floor - PLOT * getattr(m, kind) / self._most for m in memory]
                for x, y in ((column, min(levels)), (column + 0.5, levels[-1])):
                    if y != last:
                        path += f"{'H' if path else 'M'}{x:g}{'V' if path else ' '}{y:.1f}"
                        last = y
            if path:
                path += f"H{right:.1f}V{floor:g}H{min(columns):g}Z"
                yield f'<path d="{path}" class="{kind}"/>'
        peak = max((m.reserved for memory in columns.values() for m in memory), default=0)
        y = floor - PLOT * peak / self._most
        yield f'<text x="{LEFT + 4}" y="{y + 12:.1f}">{_human(peak)} reserved</text>'
        yield f'<path d="M{LEFT} {floor:g}H{right:.1f}" class="line"/>'


def _kind(span: Span) -> str:
    if span.lane == HOST:
        return "limiter" if span.name == LIMITER else "stall"
    return (
        f"{'compute' if span.lane == COMPUTE else 'sends'} {'odd' if span.number % 2 else 'even'}"
    )


def _tip(span: Span) -> str:
    return f"{span.name or span.lane}: {(span.end - span.start) * 1e3:.3g} ms"


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" class="{kind}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _legend(waits: set[str], height: float) -> Iterator[str]:
    place = float(LEFT)
    for kind, text, there in (
        ("compute even", "compute, by unit", True),
        ("sends even", "communication", True),
        ("limiter", "host waits for the limiter", LIMITER in waits),
        ("stall", "host waits", STALL in waits),
        ("reserved", "reserved", True),
        ("active", "active", True),
        ("allocated", "allocated", True),
    ):
        if there:
            yield f'<rect x="{place}" y="{height - 22}" width="10" height="10" class="{kind}"/>'
            yield f'<text x="{place + 14}" y="{height - 13}" class="legend">{text}</text>'
            place += 30 + 6 * len(text)


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


def text(tape: list[Entry], width: int = 100) -> str:
    """The last step for a terminal: a row for each lane, a column for each slice of time."""
    entries, start, end = last_step(tape)
    drawn = spans(entries)
    rows = []
    for lane in (HOST, *STREAMS):
        mine = [span for span in drawn if span.lane == lane and span.end > start]
        if not mine and lane != HOST:
            continue
        row = ["." if lane != HOST else "-"] * width
        for span in mine:
            first = int((max(span.start, start) - start) / (end - start) * width)
            last = max(int((min(span.end, end) - start) / (end - start) * width), first + 1)
            for column in range(first, min(last, width)):
                row[column] = _letter(span)
        rows.append(f"{lane:>9} {''.join(row)}")
    rows.append(f"{'':9} 0{f'{(end - start) * 1e3:.3g} ms':>{width - 1}}")
    return "\n".join(rows)


def _letter(span: Span) -> str:
    if span.lane == HOST:
        return "L" if span.name == LIMITER else "w"
    return "#" if span.number < 0 else "0123456789abcdefghijklmnopqrstuvwxyz"[span.number % 36]


_STYLE = """<style>
text { font: 11px system-ui, sans-serif; fill: #57606a; }
.title { font-size: 13px; font-weight: 600; }
.lane { text-anchor: end; } .tick, .unit { text-anchor: middle; }
.unit { font-size: 10px; fill: #fff; }
.line { stroke: #8c959f; stroke-opacity: .4; fill: none; }
.host { fill: #8c959f; fill-opacity: .55; }
.compute.even { fill: #1f6feb; } .compute.odd { fill: #4184e4; }
.sends.even { fill: #8250df; } .sends.odd { fill: #986ee2; }
.limiter { fill: #e16f24; } .stall { fill: #bf8700; fill-opacity: .6; }
.reserved { fill: #8c959f; fill-opacity: .35; } .active { fill: #2da44e; fill-opacity: .45; }
.allocated { fill: #2da44e; }
@media (prefers-color-scheme: dark) { text { fill: #adbac7; } .unit { fill: #fff; } }
</style>"""

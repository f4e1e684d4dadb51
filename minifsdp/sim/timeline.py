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
from collections.abc import Callable, Iterator
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


def svg(tape: list[Entry], title: str = "") -> str:
    """The last step as an SVG, :data:`WIDTH` pixels wide."""
    entries, start, end = last_step(tape)
    drawn = spans(entries)
    lanes = [HOST, *(s for s in STREAMS if any(span.lane == s for span in drawn))]
    top = 30
    bottom = top + LANE * len(lanes)
    height = bottom + 24 + PLOT + 40
    scale = (WIDTH - LEFT - RIGHT) / (end - start or 1.0)

    def x(time: float) -> float:
        return LEFT + (min(max(time, start), end) - start) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title, quote=True)}">',
        _STYLE,
        f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>',
    ]
    for row, lane in enumerate(lanes):
        y = top + row * LANE
        parts.append(f'<text x="{LEFT - 8}" y="{y + 16}" class="lane">{lane}</text>')
        parts.append(f'<path d="M{LEFT} {y + LANE - 3}H{WIDTH - RIGHT}" class="line"/>')
        if lane == HOST:
            parts.append(_rect(LEFT, y + 9, WIDTH - LEFT - RIGHT, 5, "host", "launching"))
        for span in drawn:
            if span.lane == lane and span.end > start and span.start < end:
                left, width = x(span.start), max(x(span.end) - x(span.start), 0.6)
                parts.append(_rect(left, y + 3, width, LANE - 7, _kind(span), _tip(span)))
                if span.lane != HOST and width > 7 * len(span.name) + 4 and span.name:
                    parts.append(
                        f'<text x="{left + width / 2:.1f}" y="{y + 16}" class="unit">'
                        f"{escape(span.name)}</text>"
                    )
    parts += _memory([e for e in entries if isinstance(e, Memory)], x, end, bottom + 24)
    for at in _ticks(end - start):
        parts.append(
            f'<text x="{x(start + at):.1f}" y="{bottom + 14}" class="tick">{at * 1e3:g} ms</text>'
        )
    parts += _legend({span.name for span in drawn if span.lane == HOST}, height)
    return "\n".join([*parts, "</svg>\n"])


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


def _memory(
    memory: list[Memory], x: Callable[[float], float], end: float, top: float
) -> Iterator[str]:
    """Three areas, the largest behind."""
    most = max((m.reserved for m in memory), default=0) or 1
    for kind in ("reserved", "active", "allocated"):
        level, path = None, ""
        for m in memory:
            value = getattr(m, kind)
            if value != level:
                y = top + PLOT * (1 - value / most)
                path += f"{'H' if path else 'M'}{x(m.time):.1f}{'V' if path else ' '}{y:.1f}"
                level = value
        if path:
            first = x(memory[0].time)
            path += f"H{x(end):.1f}V{top + PLOT}H{first:.1f}Z"
            yield f'<path d="{path}" class="{kind}"/>'
    yield f'<text x="{LEFT - 8}" y="{top + 10}" class="lane">{_human(most)}</text>'
    yield f'<text x="{LEFT - 8}" y="{top + PLOT}" class="lane">0</text>'
    yield f'<path d="M{LEFT} {top + PLOT}H{WIDTH - RIGHT}" class="line"/>'


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
            place += 30 + 6.1 * len(text)


def _ticks(seconds: float) -> Iterator[float]:
    """Round times, five to ten of them."""
    if seconds <= 0:
        return
    decade = 10.0 ** math.floor(math.log10(seconds))
    step = next(decade / cut for cut in (1, 2, 5, 10) if seconds >= 5 * decade / cut)
    for count in range(int(seconds / step) + 1):
        yield count * step


def _human(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


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

"""Who was busy when: what there is to draw of a tape, and a drawing of it for a terminal."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import COMPUTE, HOST, STREAMS, Entry, Op, Phase, Wait

LIMITER, STALL = "limiter", "host waits"
OPTIMIZER, LOSS = "optimizer", "loss"
GAP = 2e-5  # seconds; work of one unit with less than this in between is drawn as one


class Span(NamedTuple):
    """Something in a lane."""

    lane: str
    start: float
    end: float
    name: str  # of the unit, "loss", "optimizer", or who makes the host wait
    number: int  # of the unit, by their names: the same in each pass of a step; -1: none


def spans(entries: list[Entry]) -> list[Span]:
    """What there is to draw: work on the streams, together where it is the same unit's and without
    a gap, and the host's waits."""
    whose = dict(turns(entries))
    units = sorted({*whose.values()} - {"", LOSS, OPTIMIZER}, key=_by_number)
    found: list[Span] = []
    open_: dict[str, Span] = {}
    for entry in entries:
        if isinstance(entry, Wait) and entry.waiter == HOST and entry.until > entry.launched:
            name = LIMITER if entry.by_limiter else STALL
            found.append(Span(HOST, entry.launched, entry.until, name, -1))
        elif isinstance(entry, Op) and entry.stream != HOST:
            unit, last = whose[entry], open_.get(entry.stream)
            number = units.index(unit) if unit in units else -1
            if last is not None and last.name == unit and entry.start - last.end < GAP:
                open_[entry.stream] = last._replace(end=entry.end)
                continue
            if last is not None:
                found.append(last)
            open_[entry.stream] = Span(entry.stream, entry.start, entry.end, unit, number)
    return [*found, *open_.values()]


def turns(entries: list[Entry]) -> Iterator[tuple[Op, str]]:
    """Each piece of work, and whose it is: a unit's, the loss's or the optimizer's; "": nobody
    knows. Between two uses of a unit's parameters it is still its turn."""
    turn = ""
    for entry in entries:
        if isinstance(entry, Phase):
            turn = {"backward": LOSS, "optimizer": OPTIMIZER}.get(entry.name, "")
        elif isinstance(entry, Op):
            unit = _unit(entry)
            if entry.stream == COMPUTE:
                unit = turn = unit or turn
            yield entry, unit


def _by_number(name: str) -> list[str | int]:
    """To sort by: ``blocks.9`` comes before ``blocks.10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _unit(op: Op) -> str:
    """What the engine says, or else whose parameters are read."""
    labels = [op.label, *(buffer.label for buffer in op.reads)]
    return next((label.split(" ", 1)[1] for label in labels if " " in label), "").strip("'")


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

"""A step by units: the all-gather, forward, backward, reduction and free of each as one piece, and
what each piece waits for.

::

    host      |launches ... |limiter|    a wait of the host, or a unit that it frees
    unshard        | all-gather 0 | all-gather 1 |
    compute                       | forward 0    | forward 1 |      waits for all-gather 1

A step of thousands of kernels becomes a hundred pieces, few enough to send and to read.
"""

from typing import NamedTuple

from minifsdp.sim.figures.report import ALL_GATHER
from minifsdp.sim.tape import HOST, Buffer, Entry, Mark, Memory, Op, Phase, Wait
from minifsdp.sim.views.spans import GAP, LIMITER, LOSS, OPTIMIZER, STALL, turns

FREE, CAST, OTHER = "free", "cast", "other"


class Piece(NamedTuple):
    """Something that is done for one unit. Times are in seconds.

    ``waits`` are the pieces that it was told to wait for, by their places in the list, and until
    when; collectives also wait for each other, since NCCL does one at a time.
    """

    lane: str  # a stream, or the host
    kind: str  # in the engine's words, such as "all-gather"; a phase; or one of those above
    unit: str  # "": no unit's
    launched: float  # its first kernel, by the host
    start: float
    end: float
    waits: tuple[tuple[int, float], ...] = ()


def pieces(entries: list[Entry]) -> list[Piece]:
    """What was done in these entries, in the order of the launches."""
    whose, phase = dict(turns(entries)), ""
    found: list[Piece] = []
    last: dict[str, int] = {}  # the place of each lane's last piece
    marked: dict[Mark, int] = {}  # the piece that an event comes after
    waits: dict[str, dict[int, float]] = {}  # of each stream, for what comes next on it
    gathered: dict[Buffer, str] = {}  # whose parameters
    collective = -1
    for entry in entries:
        if isinstance(entry, Phase):
            phase = entry.name
        elif isinstance(entry, Mark) and entry.stream in last:
            marked[entry] = last[entry.stream]
        elif isinstance(entry, Wait):
            mark = entry.mark
            there = {marked[mark]: mark.time} if mark is not None and mark in marked else {}
            if entry.waiter != HOST:
                waits.setdefault(entry.waiter, {}).update(there)
            elif entry.until > entry.launched:
                kind = LIMITER if entry.by_limiter else STALL
                times = entry.launched, entry.launched, entry.until
                found.append(Piece(HOST, kind, "", *times, tuple(there.items())))
        elif isinstance(entry, Memory) and entry.freed and entry.buffer in gathered:
            now = entry.time
            found.append(Piece(HOST, FREE, gathered.pop(entry.buffer), now, now, now))
        elif isinstance(entry, Op) and entry.stream != HOST:
            unit, lane = whose[entry], entry.stream
            if entry.name == ALL_GATHER:
                gathered |= dict.fromkeys(entry.writes, unit)
            its, kind = waits.pop(lane, {}), _kind(entry, unit, phase)
            if entry.sent and collective >= 0 and found[collective].end == entry.start:
                its |= {collective: entry.start} if found[collective].lane != lane else {}
            before = found[last[lane]] if lane in last else None
            if (
                before is not None
                and (before.kind, before.unit) == (kind, unit)
                and entry.start - before.end < GAP
                and not any(until > before.end for until in its.values())
            ):
                found[last[lane]] = before._replace(end=entry.end)
            else:
                last[lane] = len(found)
                times = entry.launched, entry.start, entry.end
                found.append(Piece(lane, kind, unit, *times, tuple(its.items())))
            collective = last[lane] if entry.sent else collective
    return found


def _kind(op: Op, unit: str, phase: str) -> str:
    """What a piece of work is for."""
    if op.label:
        return op.label.split(" ")[0]
    if any(buffer.label.startswith("reduce ") for buffer in op.reads):
        return CAST  # of a gradient that was reduced, to the parameters' dtype
    if unit in (LOSS, OPTIMIZER):
        return unit
    return phase if unit else OTHER

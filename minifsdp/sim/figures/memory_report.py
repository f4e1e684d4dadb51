"""What the memory of a step is: parameters, activations, ...; and the moment when it was most.

Nobody says at an allocation what it is for. It is told by what else is known of a buffer, in this
order:

    parameters, gradients, optimizer   named by :meth:`VirtualGpu.tag`: what stays between steps, a
                                       shard of each
    gathered parameters                allocated by the engine for an all-gather, or an upload; or
                                       copied from there (training/fsdp2.py)
    unsharded gradients                what a reduction reads, or allocates on its way
    kept from earlier steps            anything else that was there when the step began
    activations                        allocated in the forward, and still there at its end
    temporary                          the rest
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Buffer, Entry, Memory, Op, Phase
from minifsdp.sim.views.spans import turns

TAGS = ("parameters", "gradients", "optimizer")
GATHERED, UNREDUCED = "gathered parameters", "unsharded gradients"
KEPT, ACTIVATIONS, TEMPORARY = "kept from earlier steps", "activations", "temporary"
KINDS = (*TAGS, GATHERED, UNREDUCED, KEPT, ACTIVATIONS, TEMPORARY)


class Life(NamedTuple):
    """A buffer, from the host's allocation to its free. ``nbytes`` are those of its block, which
    may be larger than what was asked for."""

    buffer: Buffer
    nbytes: int
    kind: str  # one of KINDS
    places: range  # of the entries on the tape after which it was there
    begin: float  # seconds, not before the step
    end: float  # and not after it


def lives(tape: list[Entry]) -> list[Life]:
    """All that had memory in the last step, in the order of their allocation."""
    entries, start, end = last_step(tape)
    first = tape.index(entries[0]) if entries else 0
    last = first + len(entries)
    kind_of = _kinds(entries)
    begun: dict[Buffer, tuple[int, int, float]] = {}  # place, bytes, time
    found: list[Life] = []

    def ends(buffer: Buffer, place: int, time: float) -> None:
        begin, nbytes, since = begun.pop(buffer)
        kind = KEPT if begin < first and not buffer.kind else kind_of(buffer)
        if place > first:
            found.append(Life(buffer, nbytes, kind, range(begin, place), max(since, start), time))

    before = 0
    for place, entry in enumerate(tape[:last]):
        if isinstance(entry, Memory):
            if entry.freed:
                ends(entry.buffer, place, entry.time)
            else:
                begun[entry.buffer] = place, entry.allocated - before, entry.time
            before = entry.allocated
    for buffer in list(begun):
        ends(buffer, last, end)
    return sorted(found, key=lambda life: life.places.start)


def _kinds(entries: list[Entry]) -> Callable[[Buffer], str]:
    """A function that says what kind of memory a buffer of this step is."""
    copied: set[Buffer] = set()  # from gathered parameters
    reduced: set[Buffer] = set()
    forward: set[Buffer] = set()
    phase = ""
    for entry in entries:
        if isinstance(entry, Phase):
            phase = entry.name
        elif isinstance(entry, Memory) and phase == "forward":
            (forward.discard if entry.freed else forward.add)(entry.buffer)
        elif isinstance(entry, Op) and entry.name == "copy_" and any(map(_gathered, entry.reads)):
            copied.update(entry.writes)
    for entry in reversed(entries):
        # Layers' gradients are put together by a `cat` before they are reduced as one.
        if isinstance(entry, Op) and (
            entry.label.startswith(("reduce ", "all-reduce "))
            or (entry.name == "cat" and not reduced.isdisjoint(entry.writes))
        ):
            reduced.update(entry.reads, entry.writes)

    def kind(buffer: Buffer) -> str:
        if buffer.kind:
            return buffer.kind
        if _gathered(buffer) or buffer in copied:
            return GATHERED
        if buffer in reduced:
            return UNREDUCED
        return ACTIVATIONS if buffer in forward else TEMPORARY

    return kind


def _gathered(buffer: Buffer) -> bool:
    return buffer.label.startswith(("all-gather ", "upload "))


def peak_report(tape: list[Entry]) -> dict[str, Any]:
    """The last step's ``peak allocated``: ``"peak allocated is"``, bytes by kind, which add up to
    it; and ``"peak is in"``, the phase, the operator and the unit that it was reached in."""
    entries, *_ = last_step(tape)
    levels = [entry for entry in entries if isinstance(entry, Memory)]
    if not levels:
        return {"peak allocated is": {}, "peak is in": ""}
    peak = max(levels, key=lambda entry: entry.allocated)
    place = tape.index(peak)
    alive = [life for life in lives(tape) if place in life.places]
    is_ = {kind: sum(life.nbytes for life in alive if life.kind == kind) for kind in KINDS}
    return {
        "peak allocated is": {kind: nbytes for kind, nbytes in is_.items() if nbytes},
        "peak is in": _moment(entries, peak),
    }


def _moment(entries: list[Entry], then: Memory) -> str:
    """Where the host was: "backward, mm of blocks.3", or "backward, all-gather 'blocks.2'"."""
    here = entries.index(then)
    phase = next((e.name for e in reversed(entries[:here]) if isinstance(e, Phase)), "")
    # Its operator comes after its memory.
    turn = (unit for op, unit in turns(entries) if then.buffer in op.writes)
    what, unit = then.buffer.label, next(turn, "")
    if unit not in ("", phase) and " " not in what:
        what += f" of {unit}"
    return f"{phase}, {what}" if phase else what

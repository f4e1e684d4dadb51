"""What one training step took, read from the tape.

Communication is *exposed* where it keeps the compute stream waiting; the rest is hidden behind the
computation. The host *stalls* where it waits for the device, in the limiter or elsewhere.
"""

from itertools import accumulate
from typing import Any

from minifsdp.sim.tape import COMPUTE, HOST, Buffer, Entry, Memory, Mistarget, Note, Op, Use, Wait

ALL_GATHER = "_allgather_base_"  # as torch calls the operator

Spans = list[tuple[float, float]]


def last_step(tape: list[Entry]) -> tuple[list[Entry], float, float]:
    """The entries between the last two ends of a step, and these two times. With fewer of them, all
    that there is."""
    ends = [i for i, entry in enumerate(tape) if isinstance(entry, Note)]
    if not ends:
        return tape, 0.0, max((e.end for e in tape if isinstance(e, Op)), default=0.0)
    first = ends[-2] + 1 if len(ends) > 1 else 0
    start = tape[ends[-2]].time if len(ends) > 1 else 0.0  # type: ignore[union-attr]
    return tape[first : ends[-1]], start, tape[ends[-1]].time  # type: ignore[union-attr]


def report(tape: list[Entry]) -> dict[str, Any]:
    """Figures of the last step. Times are in seconds, memory and traffic in bytes."""
    entries, start, end = last_step(tape)
    ops = [entry for entry in entries if isinstance(entry, Op)]
    memory = [entry for entry in entries if isinstance(entry, Memory)]
    waits = [e for e in entries if isinstance(e, Wait) and e.waiter == HOST]
    compute = union([(op.start, op.end) for op in ops if op.stream == COMPUTE])
    communication = union([(op.start, op.end) for op in ops if op.sent])
    busy = length(union([*compute, *communication]))
    stalls = {"limiter": 0.0, "other": 0.0}
    for wait in waits:
        reason = "limiter" if wait.by_limiter else "other"
        stalls[reason] += max(wait.until - wait.launched, 0.0)
    missed = [entry for entry in entries if isinstance(entry, Mistarget)]
    return {
        "step": end - start,
        "compute": length(compute),
        "communication": length(communication),
        "exposed communication": busy - length(compute),
        "overlap": length(compute) + length(communication) - busy,
        "idle": (end - start) - busy,
        "host stalls in the limiter": stalls["limiter"],
        "other host stalls": stalls["other"],
        "peak allocated": max((m.allocated for m in memory), default=0),
        "peak active": max((m.active for m in memory), default=0),
        "peak reserved": max((m.reserved for m in memory), default=0),
        "peak unsharded units": _most_alive(entries, _gathered(entries)),
        "mistargeted prefetches": len(missed),
        "bytes sent": sum(op.sent for op in ops),
        "flops": sum(op.flops for op in ops),
    }


def _gathered(entries: list[Entry]) -> dict[Buffer, float]:
    """Parameters that were gathered, and when the device is done with them. 0 where the allocator
    was not told that another stream uses them: then the next one may have their memory as soon as
    the host has freed them (as in FSDP2, where the streams wait for each other)."""
    shared = {entry.buffer for entry in entries if isinstance(entry, Use)}
    done: dict[Buffer, float] = {}
    for op in (entry for entry in entries if isinstance(entry, Op)):
        if op.name == ALL_GATHER:
            done.update(dict.fromkeys(op.writes, 0.0))
        for buffer in (*op.reads, *op.writes):
            if buffer in done and buffer in shared:
                done[buffer] = max(done[buffer], op.end)
    return done


def _most_alive(entries: list[Entry], done: dict[Buffer, float]) -> int:
    """Of these buffers, at one time: from their allocation until the host has freed them and the
    device is done with them."""
    changes = []
    for entry in entries:
        if isinstance(entry, Memory) and entry.buffer in done:
            time = max(entry.time, done[entry.buffer]) if entry.freed else entry.time
            changes.append((time, -1 if entry.freed else 1))
    alive = list(accumulate(change for _, change in sorted(changes)))
    return max(alive, default=0)


def union(spans: Spans) -> Spans:
    """The same times, without overlaps, in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(spans: Spans) -> float:
    """Of all spans together."""
    return sum(end - start for start, end in spans)

"""What one training step took, read from the tape.

Communication is *exposed* where it keeps the compute stream waiting; the rest is hidden behind the
computation. The host *stalls* where it waits for the device, in the limiter or elsewhere.
"""

from typing import Any

from minifsdp.sim.tape import COMPUTE, HOST, Entry, Memory, Note, Op, Wait

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
    compute = _union([(op.start, op.end) for op in ops if op.stream == COMPUTE])
    communication = _union([(op.start, op.end) for op in ops if op.sent])
    busy = _length(_union([*compute, *communication]))
    stalls = {"limiter": 0.0, "other": 0.0}
    for wait in waits:
        reason = "limiter" if wait.by_limiter else "other"
        stalls[reason] += max(wait.until - wait.launched, 0.0)
    return {
        "step": end - start,
        "compute": _length(compute),
        "communication": _length(communication),
        "exposed communication": busy - _length(compute),
        "overlap": _length(compute) + _length(communication) - busy,
        "idle": (end - start) - busy,
        "host stalls in the limiter": stalls["limiter"],
        "other host stalls": stalls["other"],
        "peak allocated": max((m.allocated for m in memory), default=0),
        "peak active": max((m.active for m in memory), default=0),
        "peak reserved": max((m.reserved for m in memory), default=0),
        "bytes sent": sum(op.sent for op in ops),
        "flops": sum(op.flops for op in ops),
    }


def _union(spans: Spans) -> Spans:
    """The same times, without overlaps, in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)

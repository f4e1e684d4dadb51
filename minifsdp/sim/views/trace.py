"""Files for other people's viewers: a trace for Perfetto, a snapshot for torch's memory viewer.

The trace (``ui.perfetto.dev``, "Trace Event Format") has a process for the rank, a thread for each
stream, an arrow from each event to whoever waits for it, and memory as counters. The snapshot is
what ``torch.cuda.memory._snapshot()`` gives on a GPU: ``python -m torch.cuda._memory_viz`` and
``pytorch.org/memory_viz`` read it.
"""

import gc
from typing import Any

from minifsdp.sim.memory.allocator import Allocator
from minifsdp.sim.memory.blocks import Block
from minifsdp.sim.tape import HOST, STREAMS, Entry, Mark, Memory, Op, Wait
from minifsdp.sim.views.frames import Frame


def chrome_trace(tape: list[Entry], name: str = "rank 0") -> dict[str, Any]:
    """All of a tape, as an object for :func:`json.dump`."""
    threads = {stream: number for number, stream in enumerate((HOST, *STREAMS))}
    marks = {entry: number for number, entry in enumerate(tape) if isinstance(entry, Mark)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": stream}}
            for stream, tid in threads.items()
        ),
    ]

    def add(kind: str, lane: str, time: float, **more: Any) -> None:
        events.append({"ph": kind, "pid": 0, "tid": threads[lane], "ts": time * 1e6, **more})

    for entry in tape:
        if isinstance(entry, Op):
            args = {"label": entry.label, "flops": entry.flops, "bytes sent": entry.sent}
            duration = (entry.end - entry.start) * 1e6
            add("X", entry.stream, entry.start, dur=duration, name=entry.name, args=args)
        elif isinstance(entry, Wait):
            if entry.waiter == HOST and entry.until > entry.launched:
                duration = (entry.until - entry.launched) * 1e6
                add("X", HOST, entry.launched, dur=duration, name=f"waits in {entry.why}")
            if entry.mark is not None:
                arrow = {"cat": "wait", "id": marks[entry.mark], "name": entry.why}
                add("s", entry.mark.stream, entry.mark.time, **arrow)
                add("f", entry.waiter, max(entry.until, entry.mark.time), bp="e", **arrow)
        elif isinstance(entry, Memory):
            levels = {kind: getattr(entry, kind) for kind in ("allocated", "active", "reserved")}
            add("C", HOST, entry.time, name="memory", args=levels)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def memory_snapshot(allocator: Allocator, frames: dict[int, list[Frame]]) -> dict[str, Any]:
    """What the allocator holds now and what it has done, as an object for :func:`pickle.dump`.

    Args:
        frames: who asked for an allocation, by its place in the allocator's log.
    """
    was_on = gc.isenabled()
    gc.disable()  # else it may free a model that nobody has any more, and the log grows meanwhile
    try:
        return _snapshot(allocator, frames)
    finally:
        if was_on:
            gc.enable()


def _snapshot(allocator: Allocator, frames: dict[int, list[Frame]]) -> dict[str, Any]:
    stacks: list[list[Frame]] = []
    at: dict[int, list[Frame]] = {}  # the last one at each address
    for place, (action, address, *_, label) in enumerate(allocator.log):
        what = [{"name": label, "filename": "", "line": 0}] if label else []
        stacks.append(what + frames.get(place, []))
        if action == "alloc":
            at[address] = stacks[-1]
    return {
        "segments": [
            _segment(blocks, allocator.expandable, at)
            for first in allocator.segments.values()
            for blocks in _ranges(first)
        ],
        "device_traces": [
            [
                {
                    "action": action,
                    "addr": address,
                    "size": size,
                    "stream": _number(stream),
                    "time_us": int(time * 1e6),
                    "frames": stack,
                }
                for (action, address, size, stream, time, _), stack in zip(
                    allocator.log, stacks, strict=True
                )
            ]
        ],
    }


def _ranges(first: Block) -> list[list[Block]]:
    """The blocks of a segment; of an expandable one those that follow each other and are mapped."""
    ranges: list[list[Block]] = [[]]
    block: Block | None = first
    while block is not None:
        if block.mapped:
            ranges[-1].append(block)
        elif ranges[-1]:
            ranges.append([])
        block = block.next
    return [blocks for blocks in ranges if blocks]


def _segment(
    blocks: list[Block], expandable: bool, frames: dict[int, list[Frame]]
) -> dict[str, Any]:
    first = blocks[0]
    state = {id(b): _state(b) for b in blocks}
    allocated = sum(b.size for b in blocks if b.allocated)
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(b.size for b in blocks),
        "stream": _number(first.stream),
        "segment_type": "small" if first.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "allocated_size": allocated,
        "active_size": sum(b.size for b in blocks if state[id(b)] != "inactive"),
        "requested_size": allocated,
        "frames": [],
        "blocks": [
            {
                "address": b.address,
                "size": b.size,
                "requested_size": b.size,
                "state": state[id(b)],
                "frames": [] if state[id(b)] == "inactive" else frames[b.address],
            }
            for b in blocks
        ],
    }


def _state(block: Block) -> str:
    if block.allocated:
        return "active_allocated"
    return "active_pending_free" if block.events else "inactive"


def _number(stream: str) -> int:
    return STREAMS.index(stream) if stream in STREAMS else len(STREAMS)

"""A device that finds the waits that are missing.

On a GPU a missing wait gives wrong numbers on some days. Here everything is done in program order,
so that numbers are right; but of each operation it is noted on which stream it would run, what
memory it reads and writes, and what that stream had waited for by then. Two operations on the same
memory, one of which writes, must be ordered by waits. If they are not, that is a race. And so it
is if memory is given out again that another stream may still be using.

What a stream has seen is a clock for each of the others (happens-before, Lamport 1978). An event
carries the clocks of its stream to whoever waits for it. Work on a stream has also seen whatever
the host did before it launched it; the host sees nothing but what it waits for. As on a GPU, what
touches the host's memory only is done by the host, unless it was submitted to a stream.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import minifsdp.offload
from minifsdp import streams
from minifsdp.nest import tensors_in
from minifsdp.streams import Streams

HOST, COMPUTE = "host", "compute"
SIDE = ("unshard", "reduce", "replicate", "upload", "download")  # in the order of Streams' fields
Clocks = dict[str, int]


def merge(clocks: Clocks, others: Clocks) -> None:
    for name, time in others.items():
        clocks[name] = max(clocks[name], time)


@dataclass
class Memory:
    """Who has used one storage, and when, by his own clock."""

    owner: str  # the stream from whose pool it is
    writer: tuple[str, int]
    readers: Clocks = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)  # the allocator knows that these use it

    def unseen(self, seen: Clocks, by_readers: bool) -> set[str]:
        """Who has used it, without having been seen by someone who has seen this."""
        uses = [self.writer, *(self.readers.items() if by_readers else ())]
        return {name for name, time in uses if time > seen[name]}


class Notes(TorchDispatchMode):
    """What every stream has done and seen, and the races so far."""

    def __init__(self, forgotten: tuple[str, int, int] | None) -> None:
        super().__init__()
        names = (HOST, COMPUTE, *SIDE)
        self.seen = {name: dict.fromkeys(names, 0) for name in names}
        self.current = COMPUTE
        self.races: list[str] = []
        self.log: list[
            tuple[str, set[str]]
        ] = []  # of all operations: on which stream, whose memory
        self.forgotten = forgotten
        self.memories: dict[int, Memory] = {}
        self.freed: dict[str, list[tuple[Memory, Clocks]]] = {name: [] for name in names}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        read, written = [], []
        given = dict(zip((a.name for a in operation._schema.arguments), args, strict=False))
        given.update(kwargs or {})
        for argument in operation._schema.arguments:
            tensors = list(tensors_in(given.get(argument.name)))
            if operation.namespace == "c10d":
                (read if operation is torch.ops.c10d.send.default else written).extend(tensors)
            elif argument.alias_info is None:
                read += tensors
            elif argument.alias_info.is_write:
                written += tensors  # otherwise it gives a view, and reads nothing
        stream, owners = self.current, {self.memory(t).owner for t in (*read, *written)}
        if stream == COMPUTE and owners == {HOST}:
            stream = HOST
        self.log.append((stream, owners))
        self.use(
            stream, operation, [self.memory(t) for t in read], [self.memory(t) for t in written]
        )
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in self.memories:
                self.allocated(tensor.untyped_storage(), stream)
        blocks = stream == COMPUTE and HOST in owners  # a copy from or to the host, not submitted
        if blocks or operation is torch.ops.aten._local_scalar_dense.default:
            merge(self.seen[HOST], self.seen[COMPUTE])
        return result

    def use(self, stream: str, what: object, read: list[Memory], written: list[Memory]) -> None:
        seen = self.seen[stream]
        merge(seen, self.seen[HOST])
        seen[stream] += 1
        for memory in (*read, *written):
            others = memory.unseen(seen, by_readers=any(memory is m for m in written))
            for other in others:
                self.race(f"{what} on {stream} does not wait for {other}")
        for memory in read:
            memory.readers[stream] = seen[stream]
        for memory in written:
            memory.writer, memory.readers = (stream, seen[stream]), {}

    def memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memories:  # older than these notes
            self.allocated(storage, COMPUTE)
        return self.memories[storage._cdata]

    def allocated(self, storage: torch.UntypedStorage, owner: str) -> None:
        """`storage` has memory now, perhaps some that was used for something else."""
        if owner != HOST:  # pinned memory waits for its copies by itself
            for memory, safe in self.freed[owner]:
                merge(safe, self.seen[owner])
                for other in memory.unseen(safe, by_readers=True):
                    self.race(f"memory of {owner} that {other} may be using is given out")
            self.freed[owner].clear()
        self.memories[storage._cdata] = Memory(owner, (owner, self.seen[owner][owner]))
        weakref.finalize(storage, self.free, storage._cdata)

    def free(self, address: int) -> None:
        memory = self.memories.pop(address, None)
        if memory is not None:
            safe = dict(self.seen[memory.owner])  # the allocator waits for those it knows of
            for name in memory.recorded:
                merge(safe, self.seen[name])
            self.freed[memory.owner].append((memory, safe))

    def race(self, text: str) -> None:
        self.races.append(f"{_place()}: {text}")

    def forgets(self) -> bool:
        """Whether the wait that calls this is the one to be left out."""
        caller = sys._getframe(2)
        file, first, last = self.forgotten or ("", 0, 0)
        return Path(caller.f_code.co_filename).name == file and first <= caller.f_lineno <= last


class NotedEvent:
    """The clocks of a stream when it was recorded."""

    def __init__(self, notes: Notes, clocks: Clocks) -> None:
        self._notes, self._clocks = notes, dict(clocks)

    def wait(self) -> None:
        if not self._notes.forgets():
            merge(self._notes.seen[COMPUTE], self._clocks)

    def synchronize(self) -> None:
        if not self._notes.forgets():
            merge(self._notes.seen[HOST], self._clocks)

    def query(self) -> bool:
        host = self._notes.seen[HOST]
        return all(time <= host[name] for name, time in self._clocks.items())


class NotedStream:
    """A stream that does at once what it is told, and notes what it should have waited for."""

    def __init__(self, notes: Notes, name: str) -> None:
        self._notes, self._name = notes, name

    def submit(self, launch) -> NotedEvent:
        outer, self._notes.current = self._notes.current, self._name
        try:
            launch()()
        finally:
            self._notes.current = outer
        return self.record_event()

    def record_event(self) -> NotedEvent:
        return NotedEvent(self._notes, self._notes.seen[self._name])

    def wait_event(self, event: NotedEvent) -> None:
        if not self._notes.forgets():
            merge(self._notes.seen[self._name], event._clocks)

    def record_use(self, tensor: Tensor) -> None:
        if not self._notes.forgets():
            self._notes.memory(tensor).recorded.add(self._name)


@contextmanager
def noting_device(forgotten: tuple[str, int, int] | None = None) -> Iterator[Notes]:
    """Inside, models that are wrapped there run on such a device.

    Args:
        forgotten: a wait to be left out: the name of the file, and its first and last line.
    """
    notes = Notes(forgotten)
    resize, host_memory = torch.UntypedStorage.resize_, minifsdp.offload._host_memory

    def make(device: torch.device) -> Streams:
        return Streams(device, *(NotedStream(notes, name) for name in (COMPUTE, *SIDE)))

    def noted_resize(storage: torch.UntypedStorage, size: int) -> None:
        notes.free(storage._cdata)
        resize(storage, size)
        if size:
            notes.allocated(storage, notes.current)

    def noted_host_memory(like: Tensor, device: torch.device) -> Tensor:
        memory = host_memory(like, device)
        notes.memories[memory.untyped_storage()._cdata] = Memory(HOST, (HOST, 0))
        return memory

    with (
        patch.dict(streams.BACKENDS, cpu=make),
        patch.object(torch.UntypedStorage, "resize_", noted_resize),
        patch.object(minifsdp.offload, "_host_memory", noted_host_memory),
        notes,
    ):
        yield notes


def _place() -> str:
    """Where in minifsdp this happens, if there."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "minifsdp":
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"

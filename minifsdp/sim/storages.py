"""Which memory a tensor is in, from the moment it is made until Python lets go of it.

Tensors that are views of each other share a *storage*. A storage has a buffer: a piece of the
device's memory, or of the host's. It gets another one when it is resized.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from minifsdp.sim.memory.allocator import Allocator
from minifsdp.sim.memory.blocks import Block
from minifsdp.sim.tape import HOST, Buffer, Entry, Memory
from minifsdp.sim.views.frames import Frame, frames


class Storages:
    """All that have been seen and are alive.

    Args:
        tape: where allocations and frees are noted.
        kind: the kind of device whose tensors are in the virtual GPU's memory.
    """

    def __init__(self, allocator: Allocator, tape: list[Entry], kind: str) -> None:
        self._allocator, self._tape, self._kind = allocator, tape, kind
        self.frames: dict[int, list[Frame]] | None = None  # of allocations, by place in the log
        self._buffers: dict[int, tuple[Buffer, Block | None]] = {}  # by the address of a storage

    def knows(self, tensor: Tensor) -> bool:
        """Whether it has been seen, or a view of it."""
        return tensor.untyped_storage()._cdata in self._buffers

    def buffer(self, tensor: Tensor, stream: str, label: str) -> Buffer:
        """The memory of a tensor; if it has none yet, some from the pool of ``stream``."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._buffers:
            self.replace(storage, stream, label)
        return self._buffers[storage._cdata][0]

    def replace(self, storage: torch.UntypedStorage, owner: str, label: str) -> None:
        """Give a storage new memory, of the size that it has now: from the pool of a stream, or the
        host's. One that has shrunk to nothing is still known by the memory that it had: whoever
        reads a tensor there reads that, and is found (races.py)."""
        had = None
        if storage._cdata in self._buffers:
            had = self._forget(storage._cdata)
        else:
            weakref.finalize(storage, self._forget, storage._cdata)
        if storage.device.type != self._kind:
            owner = HOST
        size, block = storage.nbytes(), None
        self._buffers[storage._cdata] = Buffer(label, owner, 0), None  # should there be no room
        if size and owner != HOST:
            block = self._allocator.malloc(size, owner, label)
            if self.frames is not None:
                self.frames[len(self._allocator.log) - 1] = frames()
        buffer = Buffer(label, owner, size)
        if had is not None and not size and owner != HOST:
            buffer = had
        self._buffers[storage._cdata] = buffer, block
        if block is not None:
            self._note(buffer, freed=False)

    def record_stream(self, tensor: Tensor, stream: str) -> Buffer:
        """Tell the allocator that ``stream`` uses a tensor. Returns its memory."""
        buffer, block = self._buffers[tensor.untyped_storage()._cdata]
        if block is not None:
            self._allocator.record_stream(block, stream)
        return buffer

    def tag(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Note what the memory of these tensors is, from its allocation on. What has never been
        seen, or is None, is left out."""
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, what this rank has
            if local is not None and self.knows(local):
                self._buffers[local.untyped_storage()._cdata][0].kind = kind

    def _forget(self, address: int) -> Buffer | None:
        buffer, block = self._buffers.pop(address, (None, None))
        if buffer is not None and block is not None:
            self._allocator.free(block)
            self._note(buffer, freed=True)
        return buffer

    def _note(self, buffer: Buffer, freed: bool) -> None:
        a = self._allocator
        levels = a.allocated.now, a.active.now, a.reserved.now
        self._tape.append(Memory(buffer, freed, a.clock.now, *levels))

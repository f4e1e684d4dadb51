"""The CUDA caching allocator: why reserved memory is not allocated memory.

``cudaMalloc`` and ``cudaFree`` are slow, and the second waits for the whole device. So PyTorch asks
for large *segments*, cuts *blocks* out of them, and keeps what is freed for the next one. Three
numbers tell what it holds::

    allocated    blocks that tensors live in
    active       those, and blocks that were freed while another stream may still use them
    reserved     all segments: what the device has lost to this process

A free block is for its own stream only. There it may be written to at once, though the host is
ahead and the last kernel that uses it has not run: kernels of one stream run in order. Another
stream that uses a block is made known by ``record_stream``; then freeing records an event on that
stream, and the block stays *active* until the event is passed *and* somebody has looked, which is
at the next allocation. So a host that runs ahead allocates and frees in a moment what the device
needs a second for, and each time gets a new block. That is the whole reason for the rate limiter.

Numbers and rules are those of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default
settings: sizes in units of 512 bytes; small ones (up to 1 MiB) from segments of 2 MiB, others from
segments of 20 MiB, those from 10 MiB up from segments of their own; the smallest free block that is
large enough is taken, and cut if enough is left over; neighbours that are free become one again.
When memory ends, it waits for all pending frees, gives whole free segments back, and tries again.
"""

from bisect import bisect_left, insort
from collections import deque

import torch

from minifsdp.sim.blocks import Block, Level
from minifsdp.sim.clock import Clock

MiB = 1024 * 1024
ROUND = 512
SMALL = 1 * MiB  # the largest that comes from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MiB, 20 * MiB
OWN_SEGMENT = 10 * MiB  # from this size on
ROUND_SEGMENT = 2 * MiB  # of those


class Allocator:
    """Gives out memory of one virtual GPU.

    Args:
        clock: events are passed by its time.
        capacity: bytes that the process may reserve.
        malloc_seconds: what a ``cudaMalloc`` takes the host.
        free_seconds: what a ``cudaFree`` does, besides waiting for the device.
    """

    def __init__(
        self, clock: Clock, capacity: int, malloc_seconds: float = 0.0, free_seconds: float = 0.0
    ) -> None:
        self.clock, self.capacity = clock, capacity
        self.allocated, self.active, self.reserved = Level(), Level(), Level()
        self.mallocs = self.frees = self.retries = 0
        self.segments: dict[int, Block] = {}  # the first block of each, by address
        self.log: list[tuple[str, int, int, str, float, str]] = []  # in torch's words, for trace.py
        self._costs = malloc_seconds, free_seconds
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}  # keys, sorted, of each pool
        self._blocks: dict[int, Block] = {}  # the free ones, by address
        self._pending: dict[str, deque[tuple[float, Block]]] = {}  # by the stream of the event
        self._next_address = 0x7F00_0000_0000

    def malloc(self, size: int, stream: str, label: str = "") -> Block:
        """A block of at least ``size`` bytes for ``stream``. ``label`` says what for.

        Raises:
            torch.OutOfMemoryError: there is no room, though all cached memory was given back.
        """
        self._process_events()
        size = max(-(-size // ROUND) * ROUND, ROUND)
        small = size <= SMALL
        block = self._best_fit(size, stream, small) or self._new_segment(size, stream, small)
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            self._put(block.cut(size))
        block.allocated = True
        self.allocated.add(block.size)
        self.active.add(block.size)
        self._note("alloc", block, label)
        return block

    def free(self, block: Block) -> None:
        """The host is done with a block. The streams that use it may not be."""
        assert block.allocated
        block.allocated = False
        self._note("free_requested", block)
        self.allocated.add(-block.size)
        users, block.users = block.users, set()
        for stream in sorted(users):
            passed = self.clock.lane(stream).idle_at
            self._pending.setdefault(stream, deque()).append((passed, block))
            block.events += 1
        if not block.events:
            self._release(block)

    def record_stream(self, block: Block, stream: str) -> None:
        """``stream`` uses the block, too."""
        if stream != block.stream:
            block.users.add(stream)

    def empty_cache(self) -> None:
        """Wait for all pending frees, and give back every segment that is wholly free."""
        for pending in self._pending.values():
            for time, _ in pending:
                self.clock.block(time)
        self._process_events()
        whole = [
            block
            for block in self._blocks.values()
            if block.previous is None and block.next is None
        ]
        for block in whole:
            self.clock.block(self.clock.idle_at())  # cudaFree waits for the device
            self.clock.work(self._costs[1])
            self._take(block)
            del self.segments[block.address]
            self.reserved.add(-block.size)
            self.frees += 1
            self._note("segment_free", block)

    def _process_events(self) -> None:
        for pending in self._pending.values():
            while pending and pending[0][0] <= self.clock.now:
                _, block = pending.popleft()
                block.events -= 1
                if not block.events:
                    self._release(block)

    def _best_fit(self, size: int, stream: str, small: bool) -> Block | None:
        pool = self._free.get((stream, small), [])
        place = bisect_left(pool, (size, 0))
        return self._take(self._blocks[pool[place][1]]) if place < len(pool) else None

    def _new_segment(self, size: int, stream: str, small: bool) -> Block:
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            wanted = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        if self.reserved.now + wanted > self.capacity:
            self.retries += 1
            self.empty_cache()
            if self.reserved.now + wanted > self.capacity:
                raise torch.OutOfMemoryError(self._out_of_memory(size))
        self.clock.work(self._costs[0])
        self.mallocs += 1
        self.reserved.add(wanted)
        block = Block(self._next_address, wanted, stream, small)
        self._next_address += wanted
        self.segments[block.address] = block
        self._note("segment_alloc", block)
        return block

    def _release(self, block: Block) -> None:
        """Nobody uses it any more: back to the pool, together with its free neighbours."""
        self.active.add(-block.size)
        self._note("free_completed", block)
        for other in (block.previous, block.next):
            if other is not None and other.address in self._blocks:
                self._take(other)
                block = block.joined_with(other)
        self._put(block)

    def _note(self, action: str, block: Block, label: str = "") -> None:
        self.log.append((action, block.address, block.size, block.stream, self.clock.now, label))

    def _put(self, block: Block) -> None:
        insort(self._free.setdefault((block.stream, block.small), []), block.key)
        self._blocks[block.address] = block

    def _take(self, block: Block) -> Block:
        pool = self._free[block.stream, block.small]
        del pool[bisect_left(pool, block.key)]
        del self._blocks[block.address]
        return block

    def _out_of_memory(self, size: int) -> str:
        idle = self.reserved.now - self.allocated.now
        return (
            f"CUDA out of memory. Tried to allocate {_human(size)}. The virtual GPU has a total "
            f"capacity of {_human(self.capacity)} of which "
            f"{_human(self.capacity - self.reserved.now)} is free. Of the allocated memory "
            f"{_human(self.allocated.now)} is allocated by PyTorch, and {_human(idle)} is reserved "
            f"by PyTorch but unallocated."
        )


def _human(size: float) -> str:
    """As torch writes sizes."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.2f} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1024
    return f"{size:.2f} GiB"

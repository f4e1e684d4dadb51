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

Numbers and rules are those of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``: sizes in units of
512 bytes; small ones (up to 1 MiB) from segments of 2 MiB, others from segments of 20 MiB, those
from 10 MiB up from segments of their own; the smallest free block that is large enough is taken,
and cut if enough is left over; neighbours that are free become one again. When memory ends, it
waits for all pending frees, gives whole free segments back, and tries again.
What of this may be chosen is in alloc_conf.py.
"""

from collections import deque
from collections.abc import Iterable

from minifsdp.sim.hardware.clock import Clock
from minifsdp.sim.memory.alloc_conf import DEFAULTS, LARGE_SEGMENT, AllocConf, MiB
from minifsdp.sim.memory.blocks import Block, Level
from minifsdp.sim.memory.free_blocks import FreeBlocks
from minifsdp.sim.memory.out_of_memory import out_of_memory
from minifsdp.sim.memory.segments import SMALL_SEGMENT, ExpandableSegments

ROUND = 512
SMALL = 1 * MiB  # the largest that comes from the small pool
OWN_SEGMENT = 10 * MiB  # from this size on
ROUND_SEGMENT = 2 * MiB  # of those


class Allocator:
    """Gives out memory of one virtual GPU.

    Args:
        clock: events are passed by its time.
        capacity: bytes that the process may reserve.
        malloc_seconds: what a ``cudaMalloc`` takes the host.
        free_seconds: what a ``cudaFree`` does, besides waiting for the device.
        conf: as by ``PYTORCH_ALLOC_CONF``. Pages of an expandable segment that are mapped, or
            unmapped, together take as long as one ``cudaMalloc``, or one ``cudaFree``.
    """

    def __init__(
        self,
        clock: Clock,
        capacity: int,
        malloc_seconds: float = 0.0,
        free_seconds: float = 0.0,
        conf: AllocConf = DEFAULTS,
    ) -> None:
        self.clock, self.capacity = clock, capacity
        self.allocated, self.active, self.reserved = Level(), Level(), Level()
        self.mallocs = self.frees = self.retries = 0
        self.segments: dict[int, Block] = {}  # the first block of each, by address
        self.log: list[tuple[str, int, int, str, float, str]] = []  # for views/trace.py
        self._costs, self._conf = (malloc_seconds, free_seconds), conf
        self._free = FreeBlocks(conf)
        self._expandable = ExpandableSegments(self._free, self._map, self._new_addresses)
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
        block = self._free.take_best(size, stream, small) or self._new(size, stream, small)
        left, most = block.size - size, self._conf.max_split_size
        finely = small or self.expandable
        if left >= ROUND if finely else left > SMALL and (most is None or size < most):
            self._free.put(block.cut(size))
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

    @property
    def expandable(self) -> bool:
        """Whether its segments can grow."""
        return self._conf.expandable_segments

    def empty_cache(self) -> None:
        """Wait for all pending frees, and give back every segment that is wholly free, or every
        such page of an expandable one."""
        for pending in self._pending.values():
            for time, _ in pending:
                self.clock.block(time)
        self._process_events()
        if not self.expandable:
            self._give_back(self._free.whole())
            return
        for block in list(self._free.by_address.values()):
            pages = self._expandable.unmap(block)
            if pages is not None:
                # Unmapping waits for nobody by itself, so PyTorch waits for the stream.
                self.clock.block(self.clock.lane(pages.stream).idle_at)
                self._lost(pages, "segment_unmap")

    def _process_events(self) -> None:
        for pending in self._pending.values():
            while pending and pending[0][0] <= self.clock.now:
                _, block = pending.popleft()
                block.events -= 1
                if not block.events:
                    self._release(block)

    def _new(self, size: int, stream: str, small: bool) -> Block:
        """A block that was not there, if need be after others were given back."""
        self._collect_garbage()
        block = self._ask(size, stream, small)
        if block is None:
            others = self._free.too_large_to_cut(size, stream, small)
            self._give_back(others)
            block = self._ask(size, stream, small) if others else None
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._ask(size, stream, small)
        if block is None:
            raise out_of_memory(size, self.capacity, self.reserved.now, self.allocated.now)
        return block

    def _ask(self, size: int, stream: str, small: bool) -> Block | None:
        """A new segment, or an expandable one that has grown; None if the device has no room."""
        if self.expandable:
            return self._expandable.allocate(size, stream, small)
        wanted = SMALL_SEGMENT if small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            wanted = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
        block = Block(self._next_address, wanted, stream, small)
        if not self._reserve(block, "segment_alloc"):
            return None
        self._next_address += wanted
        self.segments[block.address] = block
        return block

    def _reserve(self, block: Block, action: str) -> bool:
        if self.reserved.now + block.size > self.capacity:
            return False
        self.clock.work(self._costs[0])
        self.mallocs += 1
        self.reserved.add(block.size)
        self._note(action, block)
        return True

    def _map(self, pages: Block) -> bool:
        return self._reserve(pages, "segment_map")

    def _new_addresses(self, stream: str, small: bool) -> Block:
        """For an expandable segment: more than the device has, for what is unmapped in between."""
        size = -(-self.capacity * 9 // 8 // LARGE_SEGMENT) * LARGE_SEGMENT
        address = -(-self._next_address // LARGE_SEGMENT) * LARGE_SEGMENT
        self._next_address = address + size
        self.segments[address] = block = Block(address, size, stream, small, mapped=False)
        return block

    def _collect_garbage(self) -> None:
        allowed = int(self._conf.garbage_collection_threshold * self.capacity)
        if allowed and self.reserved.now > allowed:
            self._give_back(self._free.not_used_for_long(self.reserved.now - allowed))

    def _give_back(self, segments: Iterable[Block]) -> None:
        for block in segments:
            self.clock.block(self.clock.idle_at())  # cudaFree waits for the device
            self._free.take(block)
            del self.segments[block.address]
            self._lost(block, "segment_free")

    def _lost(self, block: Block, action: str) -> None:
        self.clock.work(self._costs[1])
        self.reserved.add(-block.size)
        self.frees += 1
        self._note(action, block)

    def _release(self, block: Block) -> None:
        """Nobody uses it any more: back to the pool, together with its free neighbours."""
        self.active.add(-block.size)
        self._note("free_completed", block)
        for other in (block.previous, block.next):
            if other is not None and other in self._free:
                block = block.joined_with(self._free.take(other))
        self._free.put(block)

    def _note(self, action: str, block: Block, label: str = "") -> None:
        self.log.append((action, block.address, block.size, block.stream, self.clock.now, label))

"""Expandable segments: memory that is asked for by the page, at addresses that follow each other.

A segment of the ordinary kind has a size for good. What is left over of it when all is cut fits
fewer and fewer requests, and it goes back to the device only as a whole. An expandable segment is a
range of *addresses*, larger than the device's memory, of which pages are *mapped* as needed::

    | block | free | block | free          |  not mapped ...        pages of 2 or of 20 MiB
                           <---- a larger request: what is free here, and a few more pages

There is one for each stream and pool. What is freed is next to what was freed before, and becomes
one block with it. When memory ends, all pages that are wholly free are unmapped, also between
blocks that are in use, and may be mapped elsewhere.

Source: "Expandable Segments", a note in PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from bisect import insort
from collections.abc import Callable

from minifsdp.sim.memory.alloc_conf import LARGE_SEGMENT, MiB
from minifsdp.sim.memory.blocks import Block
from minifsdp.sim.memory.free_blocks import FreeBlocks

SMALL_SEGMENT = 2 * MiB


class ExpandableSegments:
    """All of one allocator.

    Args:
        free: its free blocks.
        reserve: asks the device for so many bytes at an address; returns whether it has them.
        new: makes a segment, which is one block that is not mapped.
    """

    def __init__(
        self,
        free: FreeBlocks,
        reserve: Callable[[Block], bool],
        new: Callable[[str, bool], Block],
    ) -> None:
        self._free, self._reserve, self._new = free, reserve, new
        self._unmapped: dict[tuple[str, bool], list[tuple[int, Block]]] = {}  # by address

    def allocate(self, size: int, stream: str, small: bool) -> Block | None:
        """A block of ``size`` bytes or more, of which some were not mapped; None if the device has
        no more. It is in nobody's list."""
        block = self._lowest(size, stream, small)
        mapped = block if block.mapped else self._map(block, size)
        while mapped is not None and mapped.size < size:
            assert mapped.next is not None
            mapped = self._map(mapped.next, size - mapped.size)
        return self._free.take(mapped) if mapped is not None else None

    def unmap(self, block: Block) -> Block | None:
        """Give back the pages that a free block covers wholly. Returns what is not mapped then and
        was so far; None if there is no such page."""
        page = _page(block.small)
        first = -(-block.address // page) * page
        last = (block.address + block.size) // page * page
        if first >= last:
            return None
        self._free.take(block)
        if first > block.address:
            before, block = block, block.cut(first - block.address)
            self._free.put(before)
        if last < block.address + block.size:
            self._free.put(block.cut(last - block.address))
        given_back = Block(block.address, block.size, block.stream, block.small)
        block.mapped = False
        for other in (block.previous, block.next):
            if other is not None and not other.mapped:
                self._remove(other)
                block = block.joined_with(other)
        self._insert(block)
        return given_back

    def _map(self, block: Block, size: int) -> Block | None:
        """Map pages for the first ``size`` bytes of a block, or for all that it has. Returns the
        free block that they belong to then."""
        pages = -(-min(size, block.size) // _page(block.small)) * _page(block.small)
        if not self._reserve(Block(block.address, pages, block.stream, block.small)):
            return None
        self._remove(block)
        if pages < block.size:
            self._insert(block.cut(pages))
        block.mapped = True
        for other in (block.previous, block.next):
            if other is not None and other in self._free:
                self._free.take(other)
                block = block.joined_with(other)
        self._free.put(block)
        return block

    def _lowest(self, size: int, stream: str, small: bool) -> Block:
        """Where the lowest room for so many bytes begins: what is not mapped, with what is free
        before and after it."""
        for _, block in self._unmapped.get((stream, small), []):
            before = block.previous
            start = before if before is not None and before in self._free else block
            room = 0
            at: Block | None = start
            while at is not None and (not at.mapped or at in self._free) and room < size:
                room += at.size
                at = at.next
            if room >= size:
                return start
        block = self._new(stream, small)
        self._insert(block)
        return block

    def _insert(self, block: Block) -> None:
        pool = self._unmapped.setdefault((block.stream, block.small), [])
        insort(pool, (block.address, block), key=lambda item: item[0])

    def _remove(self, block: Block) -> None:
        self._unmapped[block.stream, block.small].remove((block.address, block))


def _page(small: bool) -> int:
    return SMALL_SEGMENT if small else LARGE_SEGMENT

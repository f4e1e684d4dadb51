"""Blocks that are free, and which of them is given out.

The smallest that is large enough, of those that belong to the stream and to the pool of small or of
large blocks. What else there is to it are the options of alloc_conf.py.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from minifsdp.sim.memory.alloc_conf import LARGE_SEGMENT, AllocConf
from minifsdp.sim.memory.blocks import Block


class FreeBlocks:
    """All of one allocator."""

    def __init__(self, conf: AllocConf) -> None:
        self.by_address: dict[int, Block] = {}
        self._conf = conf
        self._keys: dict[tuple[str, bool], list[tuple[int, int]]] = {}  # sorted, of each pool
        self._searches = {True: 0, False: 0}  # among small ones, and among large ones

    def __contains__(self, block: Block) -> bool:
        return block.address in self.by_address

    def put(self, block: Block) -> None:
        """Add one."""
        insort(self._keys.setdefault((block.stream, block.small), []), block.key)
        self.by_address[block.address] = block
        block.searches = self._searches[block.small]

    def take(self, block: Block) -> Block:
        """Remove one, and return it."""
        keys = self._keys[block.stream, block.small]
        del keys[bisect_left(keys, block.key)]
        return self.by_address.pop(block.address)

    def take_best(self, size: int, stream: str, small: bool) -> Block | None:
        """The one to give out for so many bytes; None if a new one is needed."""
        self._searches[small] += 1
        large_enough = self._from(size, stream, small)
        best = next(large_enough, None)
        if best is None:
            return None
        if self._conf.expandable_segments:
            # What can grow counts as what it can grow to, and is left for others if possible.
            for other in large_enough:
                if _with_room(other) >= _with_room(best):
                    break
                best = other
        most = self._conf.max_split_size
        if most is not None and (
            best.size >= most if size < most else best.size >= size + LARGE_SEGMENT
        ):
            return None
        return self.take(best)

    def too_large_to_cut(self, size: int, stream: str, small: bool) -> list[Block]:
        """Blocks of which none may be given out for ``size`` bytes, but which make room for that if
        they are given back: one that is large enough by itself, or else the largest together. Empty
        if that is not enough."""
        most = self._conf.max_split_size
        if most is None or self._conf.expandable_segments:
            return []
        size = max(size, most)
        if larger := next(self._from(size, stream, small), None):
            return [larger]
        chosen: list[Block] = []
        for block in reversed([*self._from(most, stream, small)]):
            if sum(one.size for one in chosen) >= size:
                break
            chosen.append(block)
        return chosen if sum(one.size for one in chosen) >= size else []

    def not_used_for_long(self, enough: int) -> list[Block]:
        """Large blocks that are whole segments: those that were passed over more often than the
        average. If they are fewer than ``enough`` bytes, also those above the average of the rest,
        and so on."""
        ages = {b: self._searches[False] - b.searches for b in self.whole() if not b.small}
        chosen: list[Block] = []
        while ages and sum(block.size for block in chosen) < enough:
            average = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= average]
            chosen += old
            for block in old:
                del ages[block]
        return chosen

    def whole(self) -> list[Block]:
        """Those that are whole segments."""
        blocks = self.by_address.values()
        return [block for block in blocks if block.previous is None and block.next is None]

    def _from(self, size: int, stream: str, small: bool) -> Iterator[Block]:
        """The blocks of a pool that have so many bytes or more, the smallest first."""
        keys = self._keys.get((stream, small), [])
        for place in range(bisect_left(keys, (size, 0)), len(keys)):
            yield self.by_address[keys[place][1]]


def _with_room(block: Block) -> int:
    """Its size, with what it can grow by."""
    return block.size + (block.next.size if block.next and not block.next.mapped else 0)

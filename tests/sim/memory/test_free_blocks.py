"""sim/memory/free_blocks.py: which of the free blocks is given out.

All rules together are compared with another port in test_allocator.py.
"""

import pytest

from minifsdp.sim.memory.alloc_conf import AllocConf, MiB
from minifsdp.sim.memory.blocks import Block
from minifsdp.sim.memory.free_blocks import FreeBlocks


def with_blocks(conf, *sizes, small=False):
    free = FreeBlocks(conf)
    for number, size in enumerate(sizes):
        free.put(Block(number << 40, size * MiB, "compute", small))
    return free


def taken(free, size):
    block = free.take_best(size * MiB, "compute", False)
    return block and block.size // MiB


def test_the_smallest_that_is_large_enough_and_of_those_the_lowest():
    free = with_blocks(AllocConf(), 40, 20, 20, 10)
    assert free.take_best(MiB, "unshard", False) is free.take_best(MiB, "compute", True) is None
    first = free.take_best(15 * MiB, "compute", False)
    assert first.address == 1 << 40 and first not in free
    assert [taken(free, 15), taken(free, 15), taken(free, 15), taken(free, 1)] == [20, 40, None, 10]


@pytest.mark.parametrize(
    "size, best", [(99, None), (100, 110), (105, 110), (111, None), (120, None), (121, 140)]
)
def test_what_is_too_large_to_cut_is_for_what_is_nearly_as_large(size, best):
    assert taken(with_blocks(AllocConf(max_split_size=100 * MiB), 110, 140), size) == best


@pytest.mark.parametrize(
    "size, chosen",
    [(50, [110]), (105, [110]), (120, [140]), (200, [140, 110]), (300, [])],
)
def test_what_makes_room(size, chosen):
    free = with_blocks(AllocConf(max_split_size=100 * MiB), 110, 60, 140)
    blocks = free.too_large_to_cut(size * MiB, "compute", False)
    assert [block.size // MiB for block in blocks] == chosen
    assert not with_blocks(AllocConf(), 110).too_large_to_cut(50 * MiB, "compute", False)


def test_what_was_not_used_for_long():
    free = with_blocks(AllocConf(), 10, 20)
    for _ in range(3):
        taken(free, 50)
    free.put(Block(7 << 40, 30 * MiB, "unshard", False))
    assert [b.size // MiB for b in free.not_used_for_long(25 * MiB)] == [10, 20]
    assert [b.size // MiB for b in free.not_used_for_long(31 * MiB)] == [10, 20, 30]
    assert [b.size // MiB for b in free.not_used_for_long(99 * MiB)] == [10, 20, 30]


def test_what_can_grow_is_left_for_others():
    free = FreeBlocks(AllocConf(expandable_segments=True))
    at_the_end, hole = (
        Block(0, 30 * MiB, "compute", False),
        Block(1 << 40, 50 * MiB, "compute", False),
    )
    at_the_end.cut(20 * MiB).mapped = False
    free.put(at_the_end)
    free.put(hole)
    assert [taken(free, 15), taken(free, 15)] == [20, 50]
    free.put(Block(2 << 40, 25 * MiB, "compute", False))
    free.put(at_the_end)
    assert [taken(free, 15), taken(free, 15)] == [25, 20]

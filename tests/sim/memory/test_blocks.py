"""sim/memory/blocks.py: pieces that are cut and joined stay in order."""

from minifsdp.sim.memory.blocks import Block, Level


def chain(first: Block) -> list[tuple[int, int]]:
    found, block, before = [], first, None
    while block is not None:
        assert block.previous is before
        found.append((block.address, block.size))
        block, before = block.next, block
    return found


def test_what_is_cut_lies_behind_and_before_the_next():
    block = Block(1000, 100, "compute", True)
    last = block.cut(70)
    middle = block.cut(50)
    assert chain(block) == [(1000, 50), (1050, 20), (1070, 30)]
    assert block.next is middle and middle.next is last
    assert (middle.stream, middle.small) == ("compute", True)


def test_neighbours_are_joined_in_either_order():
    for swapped in (False, True):
        block = Block(1000, 100, "compute", True)
        block.cut(70)
        middle = block.cut(50)
        pair = (middle, block) if swapped else (block, middle)
        assert pair[0].joined_with(pair[1]) is block
        assert chain(block) == [(1000, 70), (1070, 30)]


def test_a_level_knows_its_highest():
    level = Level()
    for size in (10, 20, -25, 5):
        level.add(size)
    assert (level.now, level.peak) == (10, 30)

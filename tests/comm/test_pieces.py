"""pieces.py: what is sent of a gradient, and that both sides cut it in the same places."""

import pytest
import torch

from minifsdp.comm import pieces
from minifsdp.comm.blocks import by_rank
from minifsdp.comm.pieces import Pieces, messages, whole
from minifsdp.rows import Rows

pytestmark = pytest.mark.direct
LARGE = pieces.SMALL // 4  # elements of a message that is sent by itself


def cut(sizes, blocks, world_size):
    """A tensor 0, 1, 2, ... in pieces of these sizes, and what is sent of it."""
    tensor = torch.arange(sum(sizes), dtype=torch.float32)
    parts = Pieces([piece.clone() for piece in tensor.split(list(sizes))])
    return tensor, parts, messages(parts, sizes, blocks, world_size)


CUTS = {
    "in the middle of a piece": (3 * LARGE, LARGE),
    "between two pieces": (2 * LARGE, 2 * LARGE),
    "small and large by turns": (4, 2 * LARGE, 4, 4, 2 * LARGE, 4),
    "only small ones": (1, 2, 3, 4, 5, 5),
    "an empty one": (4, 0, 4),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", CUTS)
def test_what_is_sent_to_a_rank_is_its_chunk(case, world_size):
    tensor, _, found = cut(CUTS[case], None, world_size)
    assert len(found) == world_size
    for mine, its in zip(found, tensor.chunk(world_size), strict=True):
        assert torch.equal(torch.cat(mine), its)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_rows_it_is_its_block_of_each_parameter(world_size):
    shapes = [torch.Size(shape) for shape in [(5, LARGE), (7,), (1, 3), (0, 2), (4, LARGE)]]
    layout = Rows(shapes, [True] * 5, world_size)
    tensor, _, found = cut(layout.sizes, layout.blocks, world_size)
    for mine, its in zip(found, by_rank(tensor, layout.blocks, world_size), strict=True):
        assert torch.equal(torch.cat(mine), torch.cat(its))
        assert len(mine) < len(layout.blocks), "small blocks travel together"


def test_large_pieces_are_sent_from_where_they_are_and_small_ones_in_one_copy():
    _, parts, found = cut([4, 2 * LARGE, 4, 4, 2 * LARGE, 4], None, 1)
    (mine,) = found
    assert [len(part) for part in mine] == [4, 2 * LARGE, 8, 2 * LARGE, 4]
    inside = [piece.data_ptr() for piece in parts.pieces]
    assert [part.data_ptr() in inside for part in mine] == [True, True, False, True, True]


def test_a_tensor_in_one_piece_is_cut_as_pieces_are():
    """A rank may have added something to its gradient, and the other one not."""
    for sizes in ([4, 4, 2 * LARGE, 8], [2, 2], [5, 0, 3]):
        tensor, _, found = cut(sizes, None, 2)
        other = messages(tensor, sizes, None, 2)
        for mine, its in zip(found, other, strict=True):
            assert [len(part) for part in mine] == [len(part) for part in its]
            assert torch.equal(torch.cat(mine), torch.cat(its))


def test_without_sizes_each_block_is_a_message():
    tensor = torch.arange(12.0)
    assert [[m.tolist() for m in mine] for mine in messages(tensor, None, [2, 1], 4)] == [
        [[2 * rank, 2 * rank + 1], [8 + rank]] for rank in range(4)
    ]
    assert [len(mine) for mine in messages(Pieces([tensor]), None, None, 3)] == [1, 1, 1]


def test_pieces_are_only_read():
    held = [torch.ones(3), torch.ones(2)]
    parts = Pieces(held)
    whole(parts).mul_(5)
    whole(Pieces(held[:1])).mul_(5)  # a copy also where there is one piece
    parts.to(torch.float64).pieces[0].mul_(5)
    assert [piece.tolist() for piece in held] == [[1] * 3, [1] * 2]
    assert parts.to(torch.float32) is parts and parts.dtype is torch.float32
    assert parts.to(torch.bfloat16).dtype is torch.bfloat16
    tensor = torch.ones(2)
    assert whole(tensor) is tensor

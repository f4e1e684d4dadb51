"""blocks.py: where each rank's blocks are, and that collectives find them there."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives
from minifsdp.comm.blocks import (
    Columns,
    by_rank,
    copy_apart,
    in_one_piece,
    of_rank,
    together,
)
from tests.comm import one_unit
from tests.ranks import device, run

SIZES = {"two": [2, 1], "one": [3], "empty ones": [0, 2, 0], "many": [5, 1, 4, 2]}
every_size = pytest.mark.parametrize("blocks", SIZES.values(), ids=SIZES)


@pytest.mark.direct
def test_the_blocks_of_a_rank_are_those_in_the_picture():
    flat = torch.tensor([0, 0, 1, 1, 2, 2, 0, 1, 2])
    for rank, parts in enumerate(by_rank(flat, [2, 1], 3)):
        assert [part.tolist() for part in parts] == [[rank, rank], [rank]]


@pytest.mark.direct
@every_size
def test_they_are_views_and_every_element_is_in_one(blocks):
    for ranks in (1, 2, 3):
        flat = torch.zeros(ranks * sum(blocks))
        for parts in by_rank(flat, blocks, ranks):
            assert [len(part) for part in parts] == blocks
            for part in parts:
                part += 1
        assert flat.eq(1).all()


@pytest.mark.direct
def test_without_sizes_there_is_one_chunk_for_each_rank():
    parts = by_rank(torch.arange(7), None, 3)
    assert [[part.tolist() for part in own] for own in parts] == [[[0, 1, 2]], [[3, 4]], [[5, 6]]]


@pytest.mark.direct
@every_size
def test_what_one_rank_has_is_a_copy_of_its_blocks(blocks):
    for sizes in (blocks, None):
        flat = torch.arange(3 * sum(blocks))
        for rank, parts in enumerate(by_rank(flat, sizes, 3)):
            own = of_rank(flat, sizes, 3, rank)
            assert torch.equal(own, torch.cat(parts))
            assert not own.numel() or own.data_ptr() != parts[0].data_ptr()


@pytest.mark.direct
@every_size
def test_together_each_rank_has_one_piece_and_apart_all_is_where_it_was(blocks):
    for ranks in (1, 2, 3):
        flat = torch.arange(ranks * sum(blocks))
        gathered = together(flat, blocks, ranks)
        expected = [torch.cat(parts) for parts in by_rank(flat, blocks, ranks)]
        assert torch.equal(gathered, torch.cat(expected))
        back = torch.full_like(flat, -1)
        copy_apart(gathered, back, blocks, ranks)
        assert torch.equal(back, flat)


@pytest.mark.direct
def test_nothing_is_copied_where_it_is_together_already():
    flat = torch.arange(6)
    assert together(flat, None, 2) is flat and together(flat, [3], 2) is flat


# ------------------------------------------------------------------------------ in collectives


def numbers(numel, seed=0):
    generator = torch.Generator().manual_seed(seed + 100 * dist.get_rank())
    return torch.randn(numel, generator=generator).to(device())


def check_all_gather(blocks, native):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    own = numbers(sum(blocks))
    with patch.object(collectives, "NATIVE", native):
        chunks, full = torch.full((2, ranks * len(own)), torch.nan, device=device())
        one_unit.all_gather(chunks, own, group, tag=1)()
        one_unit.all_gather(full, own, group, tag=2, blocks=blocks)()
    assert torch.equal(together(full, blocks, ranks), chunks)


def check_reduce_scatter(blocks, native):
    ranks, group = dist.get_world_size(), dist.group.WORLD
    flat = numbers(ranks * sum(blocks))
    chunks = together(flat.clone(), blocks, ranks)
    with patch.object(collectives, "NATIVE", native):
        expected, finish = one_unit.reduce_scatter(chunks, group, 1 / ranks, tag=1)
        finish()
        total, finish = one_unit.reduce_scatter(flat, group, 1 / ranks, tag=2, blocks=blocks)
        finish()
    assert torch.equal(total, expected)
    assert total.untyped_storage().nbytes() == total.nbytes  # not a view that keeps `flat` alive


@pytest.mark.parametrize("check", [check_all_gather, check_reduce_scatter])
@pytest.mark.parametrize("native", [False, True], ids=["direct messages", "torch's own"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@every_size
def test_a_collective_of_blocks_is_that_of_chunks_bit_for_bit(check, native, world_size, blocks):
    run(check, world_size, blocks, native)


@pytest.mark.direct
@pytest.mark.parametrize("blocks", [[Columns(6, 3)], [2, Columns(6, 3), Columns(4, 1), 5]])
def test_columns_are_what_their_segments_are(blocks):
    """As blocks of their own: in the tensor of all ranks, and in what one rank has."""
    counted = [(block, getattr(block, "segments", 1)) for block in blocks]
    plain = [block // many for block, many in counted for _ in range(many)]
    for ranks in (1, 2, 3):
        flat = torch.arange(ranks * sum(blocks))
        for rank in range(ranks):
            own = of_rank(flat, blocks, ranks, rank)
            assert torch.equal(own, of_rank(flat, plain, ranks, rank))
        gathered = together(flat, blocks, ranks)
        assert torch.equal(gathered, together(flat, plain, ranks))
        copy_apart(gathered, out := torch.zeros_like(flat), blocks, ranks)
        assert torch.equal(out, flat)


@pytest.mark.direct
def test_the_columns_of_the_picture():
    flat = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    assert together(flat, [Columns(4, 2)], 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    found = [in_one_piece(blocks) for blocks in (None, [4], [Columns(4, 2)], [2, 2])]
    assert found == [True, True, False, False]
    in_bytes = Columns(4, 2) * 4
    assert (in_bytes, in_bytes.segments) == (16, 2)

"""shard.py: one 1-D tensor <-> world_size chunks."""

from itertools import product

import pytest
import torch

from minifsdp.core.shard import padded_shard_numel, shard, unpadded_shard_numel

pytestmark = pytest.mark.direct
SIZES = list(product(range(14), range(1, 7)))


def test_chunks_put_together_are_the_flat_tensor_then_zeros():
    for numel, ranks in SIZES:
        flat = torch.arange(1.0, numel + 1)
        together = torch.cat([shard(flat, rank, ranks) for rank in range(ranks)])
        of = f"the chunks of {flat.tolist()} over {ranks} ranks, put together, are {together}"
        assert torch.equal(together[:numel], flat), of
        assert not together[numel:].any(), f"{of}; the padding should be zero"


def test_chunks_are_equal_and_as_small_as_can_be():
    for numel, ranks in SIZES:
        size = padded_shard_numel(numel, ranks)
        of = f"{numel} elements over {ranks} ranks: padded_shard_numel says {size}"
        assert 0 <= size * ranks - numel < ranks, of
        sizes = [len(shard(torch.zeros(numel), rank, ranks)) for rank in range(ranks)]
        assert sizes == [size] * ranks, f"{of}, and shard gives chunks of {sizes}"


def test_real_elements_are_all_elements_once():
    for numel, ranks in SIZES:
        reals = [unpadded_shard_numel(numel, rank, ranks) for rank in range(ranks)]
        of = f"{numel} elements over {ranks} ranks: unpadded_shard_numel says {reals}"
        assert sum(reals) == numel, of
        assert reals == sorted(reals, reverse=True) and min(reals) >= 0, of


def test_a_late_rank_may_have_nothing():
    assert [unpadded_shard_numel(5, rank, 4) for rank in range(4)] == [2, 2, 1, 0]


def test_a_chunk_does_not_keep_the_flat_tensor_alive():
    flat = torch.arange(8.0)
    chunk = shard(flat, 0, 2)
    assert chunk.untyped_storage().size() == 4 * 4
    chunk.zero_()
    assert flat.sum() == 28


def test_dtype_stays():
    assert shard(torch.zeros(3, dtype=torch.bfloat16), 1, 2).dtype == torch.bfloat16

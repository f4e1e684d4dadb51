"""shard.py: one 1-D tensor <-> world_size chunks."""

from itertools import product

import pytest
import torch

from minifsdp.shard import padded_shard_numel, shard, unpadded_shard_numel

SIZES = list(product(range(14), range(1, 7)))


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_chunks_put_together_are_the_flat_tensor_then_zeros(numel, ranks):
    flat = torch.arange(1.0, numel + 1)
    together = torch.cat([shard(flat, rank, ranks) for rank in range(ranks)])
    assert torch.equal(together[:numel], flat)
    assert not together[numel:].any()


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_chunks_are_equal_and_as_small_as_can_be(numel, ranks):
    sizes = {len(shard(torch.zeros(numel), rank, ranks)) for rank in range(ranks)}
    assert sizes == {padded_shard_numel(numel, ranks)}
    assert 0 <= padded_shard_numel(numel, ranks) * ranks - numel < ranks


@pytest.mark.parametrize("numel, ranks", SIZES)
def test_real_elements_are_all_elements_once(numel, ranks):
    reals = [unpadded_shard_numel(numel, rank, ranks) for rank in range(ranks)]
    assert sum(reals) == numel
    assert reals == sorted(reals, reverse=True) and min(reals) >= 0


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

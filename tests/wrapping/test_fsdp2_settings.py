"""fsdp2_settings.py: the arguments of fully_shard, in the words of FullyShardedDataParallel."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from minifsdp import MixedPrecision, ShardingStrategy
from minifsdp.wrapping.fsdp2_settings import fsdp2_settings, reshards_after_forward
from tests.ranks import device, on_ranks

NO_POLICY = MixedPrecisionPolicy(), OffloadPolicy()


@on_ranks(4)
def test_a_number_of_ranks_may_be_all_or_one():
    mesh = init_device_mesh(device().type, (2, 2))
    for reshards, flat, grid in (
        (True, (None, True, 4), (None, True, 2)),
        (False, (False, 1), (False, 1)),
    ):
        assert [reshards_after_forward(given, None) for given in flat] == [reshards] * len(flat)
        assert [reshards_after_forward(given, mesh) for given in grid] == [reshards] * len(grid)
    assert reshards_after_forward(2, None)
    for wrong in (0, -1, 3, 8, 2.0, "True"):
        with pytest.raises(ValueError, match=f"={wrong!r}: expected True, False .* the 4 ranks"):
            reshards_after_forward(wrong, None)
    with pytest.raises(ValueError, match="divides the 2 ranks"):
        reshards_after_forward(4, mesh)


@on_ranks(1)
def test_one_rank_is_all_of_them():
    assert reshards_after_forward(1, None)


@on_ranks(2)
def test_strategies():
    mesh = init_device_mesh(device().type, (1, 2))
    found = [
        fsdp2_settings(its_mesh, reshards, *NO_POLICY).sharding_strategy
        for its_mesh in (None, mesh)
        for reshards in (2, 1)
    ]
    assert found == [
        ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2,
    ]  # fmt: skip


@on_ranks(1)
def test_policies():
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    settings = fsdp2_settings(None, None, low, CPUOffloadPolicy())
    assert settings.offload and settings.use_orig_params
    casts = {"cast_forward_inputs": True, "cast_root_forward_inputs": True}
    assert settings.precision == MixedPrecision(torch.bfloat16, torch.float32, **casts)
    low = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    assert not fsdp2_settings(None, None, low, OffloadPolicy()).precision.cast_root_forward_inputs
    plain = fsdp2_settings(None, None, *NO_POLICY)
    assert not plain.offload and not plain.precision.cast_root_forward_inputs

"""fsdp2_settings.py: the arguments of fully_shard, in the words of FullyShardedDataParallel."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from minifsdp import MixedPrecision, ShardingStrategy, fully_shard
from minifsdp.wrapping.fsdp2_settings import device_of, fsdp2_settings, reshards_after_forward
from tests.pretended_gpu import GPU, PretendedGpu
from tests.ranks import device, on_ranks
from tests.small import batch, layers

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


@on_ranks(4)
def test_in_a_mesh_of_some_ranks_a_number_may_be_all_of_them_or_one():
    some = DeviceMesh(device().type, [0, 1])
    assert reshards_after_forward(2, some) and not reshards_after_forward(1, some)


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


@pytest.mark.parametrize("shape", [(2,), (1, 2)])
@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy()])
@on_ranks(2)
def test_a_model_is_moved_to_the_device_of_its_mesh(offload, shape):
    plain = nn.Sequential(layers(2), nn.BatchNorm1d(6))
    expected, x = plain(batch()), batch()
    model = nn.Sequential(layers(2), nn.BatchNorm1d(6))
    with PretendedGpu():
        ignored = model[0][1][0].bias
        early = torch.optim.SGD(model[1].parameters(), lr=0.1)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(model, mesh=mesh, offload_policy=offload, ignored_params={ignored})
        unit = model._unit
        stored = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else GPU
        assert unit.device == model[1].running_mean.device == GPU
        assert {param.device for param in unit.optimized_params} == {stored}
        assert ignored.device.type == "cpu", "as by torch"
        assert early.param_groups[0]["params"] == list(model[1].parameters())
        ignored.data = ignored.data.to("cuda")
        found = model(x.to("cuda"))
        assert torch.allclose(found.cpu(), expected)
        found.sum().backward()


@on_ranks(2)
def test_what_is_on_meta_stays_there_whatever_the_mesh():
    with PretendedGpu():
        model = fully_shard(layers(1).to("meta"), mesh=init_device_mesh("cuda", (2,)))
        assert all(param.is_meta for param in model.parameters())
        model.to_empty(device="cuda")
        assert {param.device for param in model.parameters()} == {GPU}


@on_ranks(1)
def test_without_a_mesh_a_model_is_moved_where_its_group_sends_from():
    for backends, found in (
        ("cpu:gloo,cuda:gloo", None),
        ("cuda:nccl", torch.device("cuda", 3)),
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 3)),
    ):
        with (
            patch.object(dist, "get_backend_config", lambda group, backends=backends: backends),
            patch.object(torch.cuda, "current_device", lambda: 3),
        ):
            assert device_of(None) == found

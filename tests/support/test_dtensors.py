"""support/dtensors.py: the same DTensors as torch's own functions make."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minifsdp import ShardingStrategy
from minifsdp.support.dtensors import dtensor, like, standalone
from tests.ranks import device, on_ranks
from tests.small import stack


@pytest.mark.parametrize("shape", [(5,), (4, 3), (1, 2, 2)])
@on_ranks(2)
def test_it_is_what_torch_would_distribute(shape):
    unit = stack(1, 5, use_orig_params=True)._unit
    whole = torch.arange(float(torch.Size(shape).numel()), device=device()).view(shape)
    torchs = distribute_tensor(whole, unit.mesh, [Shard(0)])
    ours = dtensor(unit, unit.mesh, whole.shape, torchs.to_local())
    assert ours.shape == whole.shape and ours.stride() == whole.stride()
    assert ours.placements == torchs.placements and ours.dtype is whole.dtype
    assert torch.equal(ours.full_tensor(), whole)


@on_ranks(2)
def test_what_has_no_dimension_is_whole_on_each_rank():
    unit = stack(1, 5, use_orig_params=True)._unit
    ours = dtensor(unit, unit.mesh, torch.Size([]), torch.ones((), device=device()))
    assert ours.placements == (Replicate(),) and ours.full_tensor() == 1


@on_ranks(4)
def test_replicas_have_the_same_rows():
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    settings = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    unit = stack(1, 4, use_orig_params=True, **settings)._unit
    whole = torch.arange(8.0, device=device()).view(4, 2)
    mine = whole.chunk(2)[unit.shard_rank]
    ours = dtensor(unit, unit.mesh, whole.shape, mine)
    assert ours.placements == (Replicate(), Shard(0))
    assert torch.equal(ours.full_tensor(), whole)


@on_ranks(2)
def test_like_another_but_of_any_dtype():
    param, *_ = stack(1, 5, use_orig_params=True).parameters()
    for local in (param.to_local() + 1, param.to_local().double()):
        ours = like(param, local.detach())
        assert ours._spec.tensor_meta.dtype is local.dtype and ours.shape == param.shape
        assert ours.placements == param.placements and ours.device_mesh == param.device_mesh
        assert torch.equal(ours.to_local(), local)


def test_what_stands_alone_is_the_same_memory_as_all_of_a_storage():
    shard = torch.arange(8.0)
    for part in (shard[:6].view(2, 3), shard[6:], shard[6:6]):
        alone = standalone(part)
        assert torch.equal(alone, part) and alone.storage_offset() == 0
        assert alone.untyped_storage().nbytes() == part.numel() * part.itemsize
        assert alone.data_ptr() == part.data_ptr()
    nothing = torch.ones(3, device="meta")[1:]
    assert standalone(nothing) is nothing

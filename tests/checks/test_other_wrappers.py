"""other_wrappers.py: other wrappers around a sharded model, or inside of one."""

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from tests.ranks import device, on_ranks
from tests.small import layers, scripted, stack, step


class OwnDDP(DistributedDataParallel):
    """As frameworks have it."""


def fsdp1(module: nn.Module) -> nn.Module:
    return theirs.FullyShardedDataParallel(module, device_id=device())


def fsdp2(module: nn.Module) -> nn.Module:
    return theirs.fully_shard(module, mesh=init_device_mesh(device().type, (2,)))


OTHERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "OwnDDP": OwnDDP,
    "DataParallel": DataParallel,
    "torch's FSDP": fsdp1,
    "torch's FSDP, the second": fsdp2,
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("other", OTHERS)
@on_ranks(2)
def test_no_other_wrapper_may_be_around_a_sharded_model(other, inside, strategy):
    model = stack(1, sharding_strategy=ShardingStrategy[strategy])
    shards = [unit.sharded_flat_param.detach().clone() for unit in model.engine.units]
    around = nn.Sequential(nn.Linear(6, 6).to(device()), model) if inside else model
    name = other.split(",")[0]
    match = f"{name} cannot wrap this: .* is a minifsdp.FullySharded.*Leave {name} out"
    with pytest.raises(TypeError, match=match):
        OTHERS[other](around)
    for unit, shard in zip(model.engine.units, shards, strict=True):
        assert torch.equal(unit.sharded_flat_param, shard)  # as it was before, on each rank
    step(model)


@pytest.mark.parametrize("other", OTHERS)
@on_ranks(2)
def test_no_other_wrapper_may_be_inside(other):
    root = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))).to(device())
    root[1][0] = OTHERS[other](root[1][0])
    with pytest.raises(ValueError, match=r"module '1.0' \(.* by itself, .*Wrap the plain module"):
        FSDP(root)
    assert not root[0].weight.grad and isinstance(root[0].weight, nn.Parameter)


@on_ranks(2)
def test_what_cannot_be_flattened_is_refused_by_name():
    for bag in (nn.Embedding, nn.EmbeddingBag):
        root = nn.Sequential(nn.Linear(6, 6), bag(6, 6, sparse=True)).to(device())
        with pytest.raises(ValueError, match=r"module '1' \(Embedding.* sparse=False"):
            FSDP(root)
    with pytest.raises(ValueError, match=r"module '0' is compiled by torch\.jit"):
        FSDP(nn.Sequential(scripted(nn.Linear(6, 6))))
    root = nn.Linear(6, 6)
    root.weight = nn.Parameter(torch.eye(6).to_sparse())
    with pytest.raises(ValueError, match=r"parameter 'weight' has the layout torch\.sparse"):
        FSDP(root)
    FSDP(nn.Embedding(6, 6).to(device()))


@on_ranks(2)
def test_distributed_tensors_are_refused_by_name():
    root = layers(1)
    mesh = init_device_mesh(device().type, (2,))
    root[1][0].weight = nn.Parameter(distribute_tensor(root[1][0].weight.detach(), mesh))
    with pytest.raises(ValueError, match=r"parameter '1\.0\.weight' is a DTensor"):
        FSDP(root)


@on_ranks(2)
def test_other_wrappers_work_beside_a_sharded_model():
    stack(1)
    for other in (DistributedDataParallel, DataParallel):
        step(other(layers(1)))
    step(FSDP(layers(1)))

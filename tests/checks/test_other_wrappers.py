"""other_wrappers.py: other wrappers around a sharded model, or inside of one."""

from functools import partial

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, fully_shard
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
    ours = "(is a|is sharded by) minifsdp.FullySharded"
    match = f"{name} cannot wrap this: .* {ours}.*Leave {name} out"
    with pytest.raises(TypeError, match=match):
        OTHERS[other](around)
    for unit, shard in zip(model.engine.units, shards, strict=True):
        assert torch.equal(unit.sharded_flat_param, shard)  # as it was before, on each rank
    step(model)


@pytest.mark.parametrize("other", ["DistributedDataParallel", "OwnDDP", "DataParallel"])
@on_ranks(2)
def test_nor_around_a_module_of_fully_shard(other):
    model = fully_shard(layers(1).to(device()))
    match = r"the model \(FSDPSequential, unit <root>\) is sharded by minifsdp.fully_shard.*too\."
    with pytest.raises(TypeError, match=f"^{other} cannot wrap this: {match}"):
        OTHERS[other](model)
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
def test_a_mark_that_was_set_by_hand_is_no_wrapper():
    root = layers(1)
    root[1]._is_fsdp_managed_module = True
    model = FSDP(root)
    model._is_fsdp_managed_module = True
    step(model)


@on_ranks(2)
def test_what_cannot_be_flattened_is_refused_by_name():
    for bag in (nn.Embedding, nn.EmbeddingBag):
        root = nn.Sequential(nn.Linear(6, 6), bag(6, 6, sparse=True)).to(device())
        sparse = r"module '1' \(Embedding.* sparse=False.*ignored_modules"
        with pytest.raises(ValueError, match=sparse):
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


class Counted(torch.Tensor):
    """It takes part in each function that it is given to."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Packed(nn.Parameter):
    """As quantized parameters are: two numbers in one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """It only has an attribute more."""

    name = "weight"


class Gathered(nn.Parameter):
    """As float8 weights are: it has torch's ``fully_shard`` gather something else than itself."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.half(),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        return gathered[0].to(dtype), gathered


SUBCLASSES = {
    "TwoTensor": lambda data: nn.Parameter(TwoTensor(data, data.clone())),
    "Counted": lambda data: nn.Parameter(data.as_subclass(Counted)),
    "Packed": Packed,
    "Gathered": Gathered,
}


@pytest.mark.parametrize("shard", [FSDP, partial(FSDP, use_orig_params=True), fully_shard])
@on_ranks(2)
def test_parameters_that_compute_in_their_own_way_are_refused_by_name(shard):
    refusal = r"parameter '1\.0\.weight' is a .*{0}, .*ignored_.*or convert it to a plain"
    for name, make in SUBCLASSES.items():
        root = layers(1)
        special = root[1][0].weight = make(root[1][0].weight.detach())
        assert type(special).__name__ == name
        with pytest.raises(ValueError, match=refusal.format(name)):
            shard(root)
        assert root[1][0].weight is special and type(root) is nn.Sequential
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet: LazyLinear"):
        shard(nn.Sequential(nn.LazyLinear(6)).to(device()))
    root = layers(1)
    root[1][0].weight = Named(root[1][0].weight.detach())
    step(shard(root))


@on_ranks(2)
def test_parameters_that_compute_in_their_own_way_may_be_ignored():
    root = layers(1)
    special = root[1][0].weight = SUBCLASSES["TwoTensor"](root[1][0].weight.detach())
    fully_shard(root, ignored_params={special})
    assert root[1][0].weight is special


@on_ranks(2)
def test_other_wrappers_work_beside_a_sharded_model():
    stack(1)
    for other in (DistributedDataParallel, DataParallel):
        step(other(layers(1)))
    step(FSDP(layers(1)))

"""unsharded_storage.py: one tensor, whose storage comes and goes."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.core.unit_state import Purpose
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    mean_gradients,
    stack,
    step,
    storage,
)

LOW = torch.bfloat16


@on_ranks(2)
def test_full_is_one_tensor_with_one_storage_for_ever():
    model = stack()
    step(model)
    unit = model.engine.units[1]
    full, pointer = unit.unsharded.flat_param, unit.unsharded.flat_param.untyped_storage()._cdata
    step(model)
    assert (
        unit.unsharded.flat_param is full
        and unit.unsharded.flat_param.untyped_storage()._cdata == pointer
    )


@on_ranks(2)
def test_gathering_does_not_look_like_a_modification_to_autograd():
    model = stack()
    step(model)
    assert all(unit.unsharded.flat_param._version == 0 for unit in model.engine.units)


def prepared(strategy="FULL_SHARD", **settings):
    model = stack(sharding_strategy=ShardingStrategy[strategy], **settings)
    model.engine.start(Purpose.TRAIN)
    return model.engine.units[1]


@on_ranks(2)
def test_there_is_one_unsharded_flat_param_for_each_dtype_made_once():
    unit = prepared()
    exact = unit.unsharded.flat_param
    unit.compute_in(LOW)
    unsharded_low = unit.unsharded
    low = unsharded_low.flat_param
    assert exact.dtype is torch.float32 and low.dtype is LOW and unit.unsharded.dtype is LOW
    assert storage(unit) == 0  # it has no memory before it is needed
    assert unit.unsharded.nbytes == 42 * 2 and exact.numel() == low.numel() == 42
    unit.compute_in(torch.float32)
    assert unit.unsharded.flat_param is exact and unit.unsharded.nbytes == 42 * 4
    assert [made.flat_param for made in unit.unsharded_by_dtype._made.values()] == [exact, low]
    unit.compute_with(unsharded_low)
    assert unit.unsharded.flat_param is low and unit.unsharded.data.data_ptr() == low.data_ptr()


@on_ranks(2)
def test_one_of_any_dtype_says_when_its_gradient_is_complete():
    unit, told = prepared(), []
    unit.on_gradient = lambda: told.append(unit)
    for dtype in (torch.float32, LOW, torch.float32):
        unit.compute_in(dtype)
        unit.unsharded.allocate()
        unit.unsharded.flat_param.sum().backward()
        assert unit.unsharded.flat_param.grad.dtype is dtype
        unit.release()
    assert told == [unit] * 3


@on_ranks(2)
def test_what_somebody_refers_to_keeps_its_values_and_the_unit_gets_other_memory():
    unit = prepared()
    unit.unsharded.allocate()
    unit.unsharded.data.fill_(3)
    kept = unit.unsharded.flat_param.detach()[:6]
    unit.release()
    assert unit.leaks == 1 and storage(unit) == 0
    unit.unsharded.allocate()
    unit.unsharded.data.fill_(4)
    assert kept.tolist() == [3] * 6 and unit.unsharded.flat_param.tolist() == [4] * 42
    unit.release()
    assert unit.leaks == 1 and storage(unit) == 0  # nobody refers to the new one


class Logs(nn.Linear):
    def forward(self, x):
        self.mean = self.weight.detach().cpu().numpy().mean()
        return super().forward(x)


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_what_numpy_has_seen_is_freed(rows):
    """Not by torch, also when no array is left: the unit gets other memory."""
    torch.manual_seed(0)
    plain = nn.Sequential(Logs(6, 6), nn.Linear(6, 6)).to(device())
    policy = ModuleWrapPolicy({Logs})
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=policy, use_orig_params=rows)
    with FSDP.summon_full_params(model):
        exported = [param.detach().cpu().numpy().copy() for param in model.parameters()]
    for param, array in zip(plain.parameters(), exported, strict=True):
        assert torch.equal(param.detach().cpu(), torch.from_numpy(array))
    unit, losses = model.module[0]._unit, []
    for _ in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a parameter of unit '0' .* a NumPy array")
            losses.append(model(batch()).pow(2).sum())
        assert storage(unit) == 0
        losses[-1].backward()
        assert storage(unit) == 0
    loss = plain(batch()).pow(2).sum()
    assert losses[0] == losses[1] == loss and model.module[0].mean == plain[0].mean
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, loss))


@on_ranks(2)
def test_other_memory_that_an_evaluation_needs_may_be_trained_with():
    unit, told = prepared(), []
    unit.on_gradient = lambda: told.append(unit)
    unit.unsharded.allocate()
    kept = unit.unsharded.flat_param.detach()[:6]
    with torch.inference_mode():
        unit.release()
    unit.unsharded.allocate()
    unit.unsharded.flat_param.pow(2).sum().backward()
    assert told == [unit] and unit.leaks == 1
    assert unit.unsharded.flat_param.data_ptr() != kept.data_ptr()


@on_ranks(2)
def test_freezing_is_followed_in_every_dtype():
    unit = prepared()
    unit.compute_in(LOW)
    unit.sharded_flat_param.requires_grad_(False)
    for dtype in (torch.float32, LOW):
        unit.compute_in(dtype)
        assert not unit.unsharded.flat_param.requires_grad
    unit.sharded_flat_param.requires_grad_(True)
    unit.compute_in(LOW)
    assert unit.unsharded.flat_param.requires_grad


@on_ranks(2)
def test_a_discarded_model_is_freed():
    model = stack()
    step(model)
    shard = weakref.ref(model.engine.units[1].padded_shard)
    del model
    gc.collect()
    assert shard() is None


class TwoEnds(nn.Module):
    """Two outputs, each from a unit of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.ends = nn.ModuleList(Block(nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        return [end(x).float().pow(2).sum() for end in self.ends]


@pytest.mark.parametrize("low", [True, False])
@on_ranks(2)
def test_ranks_agree_on_who_uses_a_unit_whatever_dtypes_it_was_computed_in(low):
    """Each rank's loss comes from another unit; another forward was in another dtype."""
    precision = MixedPrecision(LOW, full_precision_in_eval=True)
    gradients = []
    for other in ("none", "before", "after"):
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({Block})
        model = FSDP(TwoEnds().to(device()), auto_wrap_policy=policy, mixed_precision=precision)
        if other == "before":
            model.train(not low)(batch(step=1))
        losses = model.train(low)(batch())
        if other == "after":
            model.train(not low)(batch(step=1))
        losses[dist.get_rank()].backward()
        gradients.append([param.grad for param in model.parameters()])
    for expected, *found in zip(*gradients, strict=True):
        assert expected.any() and all(torch.equal(grad, expected) for grad in found)

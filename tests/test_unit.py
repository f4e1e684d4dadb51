"""unit.py: one unit of sharding, its two tensors and its states."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FlatParameter
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.unit import Memory
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step


@on_ranks(2)
def test_the_shard_is_this_ranks_chunk_and_a_parameter():
    linear = nn.Linear(3, 5).to(device())  # 20 elements
    expected = torch.cat([linear.weight.detach().reshape(-1), linear.bias.detach()])
    unit = FSDP(linear)._unit
    assert isinstance(unit.shard, FlatParameter) and isinstance(unit.shard, nn.Parameter)
    assert torch.equal(unit.shard, expected.chunk(2)[dist.get_rank()])


@on_ranks(4)
def test_padding_never_reaches_the_optimizer():
    model = FSDP(nn.Linear(5, 1, bias=False).to(device()))  # 5 elements over 4 ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1)
    model(torch.ones(1, 5, device=device())).sum().backward()
    expected = [2, 2, 1, 0][dist.get_rank()]
    assert model._unit.shard.numel() == model._unit.shard.grad.numel() == expected
    with torch.no_grad():
        model._unit.shard.add_(1)  # noise, say
    optimizer.step()
    assert not model._unit.chunk[expected:].any()


@on_ranks(2)
def test_the_original_parameters_are_gone():
    linear = nn.Linear(64, 64).to(device())
    original = weakref.ref(linear.weight)
    model = FSDP(linear)
    gc.collect()
    assert original() is None
    assert [name for name, _ in model.named_parameters()] == ["_flat_param"]


@on_ranks(2)
def test_a_sharded_parameter_says_what_is_wrong():
    model = stack()
    block = model.module[2]
    weight = block.module[0].weight
    assert weight.shape == (6, 6) and weight.dtype == torch.float32 and weight.device == device()
    calls = [
        lambda: block.module(batch()),  # the wrapped module, around its wrapper
        lambda: batch() @ weight,
        lambda: batch() * weight,
        lambda: torch.norm(weight),
        lambda: weight.sum(),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, AttributeError)) as error:
            call()
        assert "parameter '0.weight' of unit '2' is sharded now" in str(error.value)
        assert "summon_full_params" in str(error.value)


@on_ranks(2)
def test_after_a_step_the_parameter_is_sharded_again_and_says_so():
    model = stack()
    step(model)
    with pytest.raises(RuntimeError, match="is sharded now"):
        model.module[2].module(batch())


@on_ranks(2)
def test_full_is_one_tensor_with_one_storage_for_ever():
    model = stack()
    step(model)
    unit = model.engine.units[1]
    full, pointer = unit.full, unit.full.untyped_storage()._cdata
    step(model)
    assert unit.full is full and unit.full.untyped_storage()._cdata == pointer


@on_ranks(2)
def test_gathering_does_not_look_like_a_modification_to_autograd():
    model = stack()
    step(model)
    assert all(unit.full._version == 0 for unit in model.engine.units)


@on_ranks(2)
def test_a_shard_that_the_user_replaced_is_followed():
    model, x = stack(), batch()
    before = model(x)
    for param in model.parameters():
        param.data = param.data * 2
    assert not torch.equal(model(x), before)
    unit = model.engine.units[1]
    assert unit.chunk.data_ptr() == unit.shard.data_ptr()


@on_ranks(3)
def test_a_model_may_be_cast_after_wrapping():
    model, x = stack(), batch().double()
    expected = layers().double()(x)
    assert torch.equal(model.double()(x), expected)
    assert model.engine.units[1].full.dtype == torch.float64


@on_ranks(2)
def test_a_shard_of_another_size_is_refused_by_name():
    model = stack()
    model.engine.units[2].shard.data = torch.zeros(3, device=device())
    with pytest.raises(ValueError, match="unit '2' has 3 elements; this rank's chunk has 21"):
        model(batch())


@on_ranks(2)
def test_freezing_after_wrapping_is_followed():
    model = stack()
    model.engine.units[2].shard.requires_grad_(False)
    step(model)
    grads = [unit.shard.grad is not None for unit in model.engine.units]
    assert grads == [True, True, False, True, True]
    model.engine.units[2].shard.requires_grad_(True)
    step(model)
    assert model.engine.units[2].shard.grad is not None


@on_ranks(2)
def test_a_unit_without_parameters_gathers_nothing():
    model = FSDP(nn.Sequential(FSDP(nn.Tanh()), FSDP(nn.Linear(6, 6).to(device()))))
    step(model)
    assert [name for name, _ in model.named_parameters()] == ["1._flat_param"]
    assert model.engine.stats.all_gathers == 2
    assert all(unit.memory is Memory.SHARDED for unit in model.engine.units)


@on_ranks(2)
def test_a_discarded_model_is_freed():
    model = stack()
    step(model)
    shard = weakref.ref(model.engine.units[1].chunk)
    del model
    gc.collect()
    assert shard() is None

"""state_dict.py: the model as it would be without sharding."""

import pytest
import torch
from torch import nn

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.groups import HYBRID
from tests.models import CASES, SharedTransformer
from tests.parity import build, check_at_rest, grid, sharded
from tests.ranks import device, on_ranks
from tests.small import batch, layers, stack, step, watch

every_strategy = pytest.mark.parametrize("strategy", ShardingStrategy)


def settings_of(strategy):
    mesh = grid(strategy) if strategy in HYBRID else None
    return {"sharding_strategy": strategy, "device_mesh": mesh}


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_it_is_that_of_the_plain_model(name):
    """Names in their order, values, dtypes, and the versions that modules keep of their format."""
    found, expected = sharded(CASES[name]).state_dict(), build(CASES[name]).state_dict()
    assert_same(found, expected)
    assert {k: v for k, v in found._metadata.items() if k in expected._metadata} == dict(
        expected._metadata
    )


@every_strategy
@on_ranks(4)
def test_from_any_strategy_to_any_other_and_back(strategy):
    source, plain = stack(**settings_of(strategy)), layers()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    step(source)
    optimizer.step()
    state = source.state_dict()
    plain.load_state_dict(state)
    assert not torch.equal(plain[0].weight, layers()[0].weight)
    for target in ShardingStrategy:
        other = stack(**settings_of(target))
        other.load_state_dict(state)
        assert torch.equal(other(batch()), plain(batch()))
        assert_same(other.state_dict(), state)
        check_at_rest(other)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_what_is_kept_is_exact_whatever_is_computed_with(offload):
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = stack(mixed_precision=precision, cpu_offload=CPUOffload(offload_params=offload))
    step(model)
    assert_same(model.state_dict(), layers().state_dict())
    other = layers(4)
    for param in other.parameters():
        param.data.add_(2**-20)  # lost in bfloat16
    model.load_state_dict(other.state_dict())
    assert_same(model.state_dict(), other.state_dict())


@on_ranks(2)
def test_it_is_a_copy_that_survives_the_next_step():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = stack(sharding_strategy=strategy)
        state, expected = model.state_dict(), layers().state_dict()
        step(model)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert_same(state, expected)


@on_ranks(2)
def test_a_parameter_with_two_names_stays_one_tensor():
    state = FSDP(SharedTransformer().to(device())).state_dict()
    assert state["output.weight"] is state["embed.weight"]


@on_ranks(2)
def test_wrappers_may_be_anywhere_in_a_plain_module():
    model = nn.ModuleDict({"a": stack(2), "b": nn.Linear(2, 2).to(device())})
    plain = nn.ModuleDict({"a": layers(2), "b": nn.Linear(2, 2).to(device())})
    plain["b"].load_state_dict(model["b"].state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        plain["a"][1][0].weight.fill_(3)
    model.load_state_dict(plain.state_dict())
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(model["a"].module[1].state_dict(prefix="x."), plain["a"][1].state_dict(prefix="x."))


@on_ranks(2)
def test_one_unit_is_out_at_a_time_and_the_root():
    model = stack(4)
    state = layers(4).state_dict()
    for use in (model.state_dict, lambda: model.load_state_dict(state)):
        with watch(model) as log:
            use()
        order = [f"{sign}{name}" for name in "1234" for sign in "+-"]
        assert log == ["+root", *order, "-root"]


@on_ranks(2)
def test_what_does_not_fit_is_named_as_in_the_plain_model():
    model, plain = stack(2), layers(2)
    state = plain.state_dict()
    state["1.0.weigth"] = state.pop("1.0.weight")
    found = model.load_state_dict(state, strict=False)
    assert found.missing_keys == ["1.0.weight"] and found.unexpected_keys == ["1.0.weigth"]
    for broken in (state, {**plain.state_dict(), "2.0.bias": torch.zeros(3)}):
        messages = []
        for target in (plain, model):
            with pytest.raises(RuntimeError) as error:
                target.load_state_dict(broken)
            messages.append(str(error.value).split("\n", 1)[1])
        assert messages[0] == messages[1]
    check_at_rest(model)
    step(model)


@on_ranks(2)
def test_between_a_forward_and_its_backward_nothing_is_lost():
    model = stack()
    expected = layers()
    loss, plain = model(batch()).pow(2).sum(), expected(batch()).pow(2).sum()
    assert_same(model.state_dict(), expected.state_dict())
    loss.backward()
    plain.backward()
    assert torch.equal(loss, plain)
    assert all(unit.shard.grad is not None for unit in model.engine.units)


@on_ranks(2)
def test_inside_a_forward_it_is_refused():
    model = stack()
    handle = model.module[1].register_forward_hook(lambda *_: model.state_dict() and None)
    with pytest.raises(RuntimeError, match="Call it between steps"):
        model(batch())
    handle.remove()
    step(model)


@on_ranks(2)
def test_copying_and_pickling_say_what_to_do_instead():
    import copy
    import pickle

    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Save state_dict\(\)"):
            attempt(stack())

"""optim_state_dict.py: the state of an optimizer, by the names of torch's FSDP1."""

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import minifsdp
from minifsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.chunks.optim_state import MARK
from minifsdp.comm.consensus import gather_objects
from tests.between_steps.test_state_dict_type import FULL, IN_ROWS, ON_THE_FIRST, SHARDED, trained
from tests.ranks import device, on_ranks, run
from tests.small import Block, batch, layers, stack, step


def same(found, expected):
    """Whether two state dicts have the same keys and values, tensors of any kind."""
    if isinstance(expected, DTensor):
        return isinstance(found, DTensor) and torch.equal(
            found._local_tensor, expected._local_tensor
        )
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found.cpu(), expected.cpu())
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def plain_optimizer():
    """What two steps of the plain model with the gradients of both ranks leave."""
    model = layers(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for at in range(2):
        model(batch(step=at)).pow(2).sum().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("settings", [
    {}, {"use_orig_params": True}, {"cpu_offload": CPUOffload(True)},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
])  # fmt: skip
@on_ranks(2)
def test_the_state_of_an_optimizer_is_that_of_the_plain_models(settings):
    model, optimizer = trained(**settings)
    plain, of_plain = plain_optimizer()
    found, expected = FSDP.optim_state_dict(model, optimizer), of_plain.state_dict()
    names = [name for name, _ in plain.named_parameters()]
    assert list(found["state"]) == names
    # With offload the step is the host's, whose kernels round as a GPU's do not.
    elsewhere = "cpu_offload" in settings and device().type != "cpu"
    close = partial(torch.allclose, rtol=1e-6, atol=1e-9) if elsewhere else torch.equal
    for name, state in zip(names, expected["state"].values(), strict=True):
        assert found["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert close(found["state"][name][key], value.cpu()), (name, key)
    (group,) = found["param_groups"]
    assert group == {**expected["param_groups"][0], "params": names}


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("from_rows", [False, True])
@IN_ROWS
@on_ranks(2)
def test_it_is_loaded_as_programs_do(in_rows, from_rows, kind):
    model, optimizer = trained(use_orig_params=from_rows)
    with FSDP.state_dict_type(model, kind):
        state = model.state_dict()
        of_optimizer = FSDP.optim_state_dict(model, optimizer)
    assert isinstance(of_optimizer["state"]["0.bias"]["exp_avg"], DTensor) == (kind is SHARDED)
    other, its_optimizer = trained(steps=1, use_orig_params=in_rows)
    with FSDP.state_dict_type(other, kind):
        other.load_state_dict(state)
        to_load = FSDP.optim_state_dict_to_load(other, its_optimizer, of_optimizer)
    its_optimizer.load_state_dict(to_load)
    losses = []
    for one, its in ((model, optimizer), (other, its_optimizer)):
        losses.append([])
        for at in (5, 6):
            losses[-1].append(step(one, at))
            its.step()
            its.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@IN_ROWS
@on_ranks(2)
def test_the_first_rank_alone_may_have_the_state(in_rows):
    model, optimizer = trained(use_orig_params=in_rows)
    expected = FSDP.optim_state_dict(model, optimizer)
    config = FullOptimStateDictConfig(rank0_only=True)
    other, its_optimizer = trained(steps=0, use_orig_params=in_rows)
    with FSDP.state_dict_type(other, FULL, ON_THE_FIRST, config):
        mine = expected if dist.get_rank() == 0 else None
        to_load = FSDP.optim_state_dict_to_load(other, its_optimizer, mine)
    its_optimizer.load_state_dict(to_load)
    found = FSDP.optim_state_dict(other, its_optimizer)
    for name, state in expected["state"].items():
        assert all(torch.equal(found["state"][name][key], state[key]) for key in state)


OPTIMIZERS = [
    (torch.optim.AdamW, {}, {"step", "exp_avg", "exp_avg_sq"}),
    (torch.optim.SGD, {}, set()),
    (torch.optim.Adagrad, {}, {"step", "sum"}),
    # Their weight decay is a part of the gradient.
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum_buffer"}),
    (torch.optim.Adam, {"weight_decay": 0.1}, {"step", "exp_avg", "exp_avg_sq"}),
    (torch.optim.NAdam, {"weight_decay": 0.1}, {"step", "exp_avg", "exp_avg_sq", "mu_product"}),
    (torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1},
     {"step", "square_avg", "momentum_buffer"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "moments"), OPTIMIZERS)
@IN_ROWS
@on_ranks(2)
def test_before_the_first_step_there_is_something_to_load_into(in_rows, kind, settings, moments):
    """As programs do with DCP, which writes into a state dict that a new optimizer gives. And what
    is saved then is the state of an optimizer that has not stepped."""
    model = stack(2, use_orig_params=in_rows)
    losses = []
    for loads in (False, True, None):
        model.load_state_dict(layers(2).state_dict())
        optimizer = kind(model.parameters(), lr=0.01, **settings)
        if loads is not None:
            with FSDP.state_dict_type(model, SHARDED):
                state = FSDP.optim_state_dict(model, optimizer)
            entries = state["state"].values()
            found = {key for entry in entries for key in entry if entry[key] is not None}
            assert found == moments
            # It is as it was. Adagrad has its state from the beginning.
            assert bool(optimizer.state) == (kind is torch.optim.Adagrad)
            (group,) = optimizer.param_groups
            assert group["weight_decay"] == optimizer.defaults["weight_decay"]
        if loads:
            to_load = FSDP.optim_state_dict_to_load(model, optimizer, state)
            optimizer.load_state_dict(to_load)
        losses.append([])
        for at in range(3):
            losses[-1].append(step(model, at))
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for one in losses for a, b in zip(one, losses[-1], strict=True))


@IN_ROWS
@on_ranks(2)
def test_gradients_stay_and_may_be_of_low_precision(in_rows):
    low = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = stack(2, use_orig_params=in_rows, mixed_precision=low)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with FSDP.state_dict_type(model, SHARDED):
        assert FSDP.optim_state_dict(model, optimizer)["state"]
        step(model)
        grads = [param.grad for param in model.parameters()]
        assert not FSDP.optim_state_dict(model, optimizer)["state"]
    assert not optimizer.state
    params = zip(grads, model.parameters(), strict=True)
    assert all(grad is not None and param.grad is grad for grad, param in params)


# --------------------------------------------------------------------------------- what is refused


def groups_of(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def check_groups():
    model = stack(1, use_orig_params=True)
    optimizer = torch.optim.AdamW(groups_of(model))
    step(model)
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    other = stack(1)
    one_group = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match=r"'0\.weight' and '0\.bias' are in one parameter group"):
        FSDP.optim_state_dict_to_load(other, one_group, state)
    again = stack(1, use_orig_params=True)
    two_groups = torch.optim.AdamW(groups_of(again), lr=0.7)
    two_groups.load_state_dict(FSDP.optim_state_dict_to_load(again, two_groups, state))
    assert [group["weight_decay"] for group in two_groups.param_groups] == [0.5, 0.0]
    assert FSDP.optim_state_dict(again, two_groups)["param_groups"] == state["param_groups"]


@on_ranks(2)
def test_what_the_first_rank_alone_has_is_checked_on_all():
    config = FullOptimStateDictConfig(rank0_only=True)
    for make, says in ((torch.optim.SGD, None), (torch.optim.AdamW, "are in one parameter group")):
        model = stack(1, use_orig_params=True)
        optimizer = make(groups_of(model), lr=0.1)
        step(model)
        optimizer.step()
        state = FSDP.optim_state_dict(model, optimizer)
        other = stack(1, use_orig_params=says is None)
        groups = groups_of(other) if says is None else other.parameters()
        its_optimizer = make(groups, lr=0.7)
        with FSDP.state_dict_type(other, FULL, ON_THE_FIRST, config):
            mine = state if dist.get_rank() == 0 else None
            if says is None:  # without any state there are settings
                FSDP.optim_state_dict_to_load(other, its_optimizer, mine, load_directly=True)
                assert [group["lr"] for group in its_optimizer.param_groups] == [0.1, 0.1]
            else:
                with pytest.raises(ValueError, match=says):
                    FSDP.optim_state_dict_to_load(other, its_optimizer, mine)


def check_empty_groups(kind):
    """As those of transformers' Trainer, which tells parameters apart by names that chunks do not
    have: one group has all of them."""
    model = stack(1)
    groups = [{"params": [], "weight_decay": 0.5}, {"params": list(model.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    step(model)
    optimizer.step()
    other = stack(1)
    groups = [{"params": []}, {"params": list(other.parameters())}]
    its_optimizer = torch.optim.AdamW(groups, lr=0.7)
    with FSDP.state_dict_type(model, kind), FSDP.state_dict_type(other, kind):
        state = FSDP.optim_state_dict(model, optimizer)
        its_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, its_optimizer, state))
    for found, expected in zip(its_optimizer.param_groups, optimizer.param_groups, strict=True):
        for key in expected.keys() - {"params", MARK}:
            assert found[key] == expected[key], key
    its_optimizer.step()


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_groups_without_parameters(kind):
    run(check_empty_groups, 2, kind)


def test_groups_that_one_flat_parameter_cannot_have_are_refused():
    run(check_groups, 2)


@on_ranks(1)
def test_an_optimizer_of_another_model_and_a_state_of_another_optimizer_are_refused():
    model, optimizer = trained()
    strange = torch.optim.AdamW([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match=r"a parameter of shape \[2, 3\] that is not one of the"):
        FSDP.optim_state_dict(model, strange)
    named, own = FSDP.optim_state_dict(model, optimizer), optimizer.state_dict()
    one_more = {**own, "state": {**own["state"], 9: {}}}
    one_less = {"state": {}, "param_groups": [{**own["param_groups"][0], "params": [0]}]}
    for state in (named, trained(blocks=3)[1].state_dict(), one_more, one_less):
        with pytest.raises(ValueError, match="AdamW cannot have returned from state_dict"):
            FSDP.optim_state_dict(model, optimizer, state)
    with pytest.raises(ValueError, match=r"None on this rank(.|\n)*rank0_only=True"):
        FSDP.optim_state_dict_to_load(model, optimizer, None)
    larger, its_optimizer = trained(blocks=3)
    with pytest.raises(ValueError, match=r"has parameter '3\.0\.weight', and the state .* 6 param"):
        FSDP.optim_state_dict_to_load(larger, its_optimizer, named)


@on_ranks(1)
def test_names_are_those_of_the_model_without_checkpoint_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = layers(1)
    model[1] = checkpoint_wrapper(model[1])
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    assert set(FSDP.optim_state_dict(model, optimizer)["state"]) == set(model.state_dict())


def named_sgd(model):
    return torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)


def named_optimizer(model):
    """Its state_dict() has names for keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, when torch imports it, and of groups
        from torch.distributed.optim import _NamedOptimizer

        return _NamedOptimizer(
            model.named_parameters(), torch.optim.Adam, [{"params": [*model.parameters()]}], lr=0.1
        )


@pytest.mark.parametrize("make", [named_sgd, named_optimizer])
@IN_ROWS
@on_ranks(2)
def test_optimizers_that_were_given_names(in_rows, make):
    plain, model = layers(2), stack(2, use_orig_params=in_rows)
    of_plain, optimizer = make(plain), make(model)
    for at in range(2):
        step(model, at)
        plain(batch(step=at)).pow(2).sum().backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for one, its in ((model, optimizer), (plain, of_plain)):
            its.step()
            one.zero_grad()
    found = FSDP.optim_state_dict(model, optimizer)
    own = of_plain.state_dict()
    names = [name for name, _ in plain.named_parameters()]
    for key, name in zip(own["state"], names, strict=True):
        assert same(found["state"][name], own["state"][key])
    (group,), (its,) = found["param_groups"], own["param_groups"]
    assert group == {**{k: v for k, v in its.items() if k != "param_names"}, "params": names}
    again = FSDP.optim_state_dict(model, optimizer, deepcopy(optimizer.state_dict()))
    assert same(again, found)

    before = deepcopy(optimizer.state_dict())
    step(model, 2)
    optimizer.step()
    named = make is named_optimizer
    to_load = FSDP.optim_state_dict_to_load(model, optimizer, found, is_named_optimizer=named)
    optimizer.load_state_dict(to_load)
    assert same(optimizer.state_dict(), before)
    assert optimizer.param_groups[0].get("param_names") == its.get("param_names") or not in_rows
    with minifsdp.as_dtensors(model, optimizer):
        (group,) = optimizer.param_groups
        assert "param_names" not in group
    assert same(optimizer.state_dict(), before)


@IN_ROWS
@on_ranks(2)
def test_a_state_from_before_is_converted_as_the_optimizers_own(in_rows):
    """As programs do that keep optimizer.state_dict() and convert it later."""
    model, optimizer = trained(use_orig_params=in_rows)
    expected, before = FSDP.optim_state_dict(model, optimizer), deepcopy(optimizer.state_dict())
    step(model, 2)
    optimizer.step()
    now = deepcopy(optimizer.state_dict())
    found = FSDP.optim_state_dict(model, optimizer, before)
    assert same(found, expected) and not same(FSDP.optim_state_dict(model, optimizer), found)
    assert same(optimizer.state_dict(), now)
    FSDP.optim_state_dict_to_load(model, optimizer, found, load_directly=True)
    assert same(optimizer.state_dict(), before)
    del before["param_groups"]
    found = FSDP.optim_state_dict(model, optimizer, before)
    assert same(found, {"state": expected["state"]})
    found = FSDP.optim_state_dict_to_load(model, optimizer, found)
    assert same(found, before)


@on_ranks(2)
def test_a_given_state_of_other_chunks_is_refused_on_all_ranks():
    model, optimizer = trained()
    states = gather_objects(optimizer.state_dict(), dist.group.WORLD)
    with pytest.raises(RuntimeError, match="was loaded from elsewhere"):
        FSDP.optim_state_dict(model, optimizer, states[0])  # which is rank 0's own


class WithTemperature(nn.Module):
    """One parameter has no dimensions, as the numbers in an optimizer's state have none."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(width, width) if width else None

    def forward(self, x):
        return (x if self.linear is None else self.linear(x)) * self.temperature


@pytest.mark.parametrize("width", [0, 6])
@on_ranks(2)
def test_the_moments_of_a_number_are_not_taken_for_numbers(width):
    model = FSDP(WithTemperature(width).to(device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    before = deepcopy(optimizer.state_dict())
    found = FSDP.optim_state_dict(model, optimizer)
    assert found["state"]["temperature"]["exp_avg"].shape == ()
    to_load = FSDP.optim_state_dict_to_load(model, optimizer, found)
    assert same(to_load, before)

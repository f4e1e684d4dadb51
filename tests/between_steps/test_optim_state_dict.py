"""optim_state_dict.py: the state of an optimizer, by the names of torch's FSDP1."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checks.optim_state import MARK
from tests.between_steps.test_state_dict_type import FULL, IN_ROWS, ON_THE_FIRST, SHARDED, trained
from tests.ranks import on_ranks, run
from tests.small import Block, batch, layers, stack, step


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
    for name, state in zip(names, expected["state"].values(), strict=True):
        assert found["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found["state"][name][key], value.cpu()), (name, key)
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


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@IN_ROWS
@on_ranks(2)
def test_before_the_first_step_there_is_something_to_load_into(in_rows, make):
    """As programs do with DCP, which writes into a state dict that a new optimizer gives. And what
    is saved then is the state of an optimizer that has not stepped."""
    model = stack(2, use_orig_params=in_rows)
    optimizer = make(model.parameters(), lr=0.01)
    losses = []
    for saves in (False, True):
        model.load_state_dict(layers(2).state_dict())
        if saves:
            optimizer = make(model.parameters(), lr=0.01)
            with FSDP.state_dict_type(model, SHARDED):
                state = FSDP.optim_state_dict(model, optimizer)
            moments = {key for entry in state["state"].values() for key in entry}
            assert moments == {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
                               torch.optim.Adagrad: {"step", "sum"}}.get(make, moments)  # fmt: skip
            to_load = FSDP.optim_state_dict_to_load(model, optimizer, state)
            optimizer.load_state_dict(to_load)
        losses.append([])
        for at in range(3):
            losses[-1].append(step(model, at))
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


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
    FSDP.optim_state_dict_to_load(again, two_groups, state)
    assert [group["weight_decay"] for group in two_groups.param_groups] == [0.5, 0.0]
    found = FSDP.optim_state_dict(again, two_groups)["param_groups"]
    for group, expected in zip(found, state["param_groups"], strict=True):
        assert {**group, "betas": tuple(group["betas"])} == expected  # torch makes a list of them


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
                FSDP.optim_state_dict_to_load(other, its_optimizer, mine)
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
            value = tuple(found[key]) if key == "betas" else found[key]
            assert value == expected[key], key
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
    assert FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())["state"]
    with pytest.raises(ValueError, match="not the optimizer's own"):
        FSDP.optim_state_dict(model, optimizer, trained()[1].state_dict())
    with pytest.raises(NotImplementedError, match="group"):
        FSDP.optim_state_dict(model, optimizer, group=dist.group.WORLD)


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

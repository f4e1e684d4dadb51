"""older_optim_state.py: programs for torch's FSDP1 that are older than optim_state_dict."""

import warnings
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import CPUOffload, ModuleWrapPolicy, OptimStateKeyType
from minifsdp import FullyShardedDataParallel as FSDP
from tests.between_steps.test_optim_state_dict import plain_optimizer, same
from tests.between_steps.test_state_dict_type import IN_ROWS, trained
from tests.ranks import device, on_ranks, run
from tests.small import Block, batch, layers, step

WAYS = {
    "each rank cuts": (
        lambda model, optimizer: FSDP.full_optim_state_dict(model, optimizer, rank0_only=False),
        lambda state, model, optimizer: FSDP.shard_full_optim_state_dict(
            state, model, optim=optimizer
        ),
    ),
    "the first rank sends": (
        FSDP.full_optim_state_dict,
        lambda state, model, optimizer: FSDP.scatter_full_optim_state_dict(
            state if dist.get_rank() == 0 else None, model, optim=optimizer
        ),
    ),
    "sharded": (FSDP.sharded_optim_state_dict, FSDP.flatten_sharded_optim_state_dict),
    "new": (
        FSDP.optim_state_dict,
        lambda state, model, optimizer: FSDP.optim_state_dict_to_load(model, optimizer, state),
    ),
}


def check_way(way, from_rows, in_rows, offload):
    save, load = WAYS[way]
    settings = {"cpu_offload": CPUOffload(offload)}
    model, optimizer = trained(use_orig_params=from_rows, **settings)
    saved = save(model, optimizer)
    if way == "the first rank sends":
        assert bool(saved) == (dist.get_rank() == 0)
    other, its_optimizer = trained(use_orig_params=in_rows, **settings)
    before = deepcopy(its_optimizer.state_dict())
    found = load(saved, other, its_optimizer)
    assert same(found, its_optimizer.state_dict())  # its own: they have been trained alike
    step(other, 5)
    its_optimizer.step()
    assert not same(found, its_optimizer.state_dict())
    found = load(saved, other, its_optimizer)
    assert not same(its_optimizer.state_dict(), before)  # nothing was loaded as yet
    its_optimizer.load_state_dict(found)
    assert same(its_optimizer.state_dict(), before)
    its_optimizer.step()  # which leaves what was saved as it is
    assert same(load(saved, other, its_optimizer), before)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("from_rows", [False, True])
@pytest.mark.parametrize("way", WAYS)
@IN_ROWS
def test_what_is_to_be_loaded_is_the_state_of_the_optimizer(in_rows, way, from_rows, offload):
    run(check_way, 2, way, from_rows, in_rows, offload)


@IN_ROWS
@on_ranks(2)
def test_ranks_may_have_their_parameters_in_different_orders(in_rows):
    """Each rank would gather another parameter than the others do."""
    model, _ = trained(steps=0, use_orig_params=in_rows)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params[::-1] if dist.get_rank() else params, lr=0.01)
    for at in range(2):
        step(model, at)
        optimizer.step()
        optimizer.zero_grad()
    _, of_plain = plain_optimizer()
    found = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    names = [name for name, _ in layers(2).named_parameters()]
    for name, expected in zip(names, of_plain.state_dict()["state"].values(), strict=True):
        assert same(found["state"][name], expected), name
    to_load = FSDP.shard_full_optim_state_dict(found, model, optim=optimizer)
    assert same(to_load, optimizer.state_dict())


@on_ranks(2)
def test_without_an_optimizer_it_is_for_the_models_parameters():
    model, optimizer = trained()
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    assert same(FSDP.shard_full_optim_state_dict(full, model), expected)
    assert same(FSDP.scatter_full_optim_state_dict(full, model), expected)
    given = [{"params": params} for params in (list(model.parameters()), [])]
    deprecated = pytest.warns(FutureWarning, match="`optim_input` argument is deprecated")
    with deprecated:
        assert same(FSDP.shard_full_optim_state_dict(full, model, model.parameters()), expected)
    with deprecated:
        found = FSDP.shard_full_optim_state_dict(full, model, given)
    assert same(found["state"], expected["state"]) and len(found["param_groups"]) == 2
    with deprecated:
        FSDP.full_optim_state_dict(model, optimizer, model.parameters())
    with deprecated, pytest.raises(ValueError, match="leave out optim_input"):
        FSDP.shard_full_optim_state_dict(full, model, model.parameters(), optimizer)


@on_ranks(2)
def test_a_group_is_compared_with_the_ranks_that_share_the_model():
    model, optimizer = trained()
    halves = [dist.new_group([rank]) for rank in range(2)]
    full = FSDP.full_optim_state_dict(model, optimizer, group=dist.group.WORLD)
    FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"shared by ranks \[0, 1\], and group has only"):
        FSDP.optim_state_dict(model, optimizer, group=halves[dist.get_rank()])
    if dist.get_rank() == 1:  # alone, it is the first rank of its own group
        alone = FSDP(layers(2), process_group=halves[1])
        its_optimizer = torch.optim.AdamW(alone.parameters())
        alone(batch()).sum().backward()
        its_optimizer.step()
        full = FSDP.full_optim_state_dict(alone, its_optimizer, group=halves[1])
        assert len(full["state"]) == 6
        found = FSDP.scatter_full_optim_state_dict(full, alone, optim=its_optimizer)
        assert same(found, its_optimizer.state_dict())


@on_ranks(2)
def test_between_numbers_and_names():
    model, optimizer = trained()
    plain, of_plain = plain_optimizer()
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain, optim=of_plain)
    expected = of_plain.state_dict()
    assert same(numbered, expected)
    of_plain.load_state_dict(numbered)
    for one in (expected, full):
        named = FSDP.rekey_optim_state_dict(one, OptimStateKeyType.PARAM_NAME, plain)
        assert same(named, full)
    assert same(FSDP.shard_full_optim_state_dict(named, model, optim=optimizer),
                optimizer.state_dict())  # fmt: skip
    with pytest.raises(ValueError, match=r"the model in chunks|of a model in chunks"):
        FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    strange = {**full, "state": {**full["state"], "9.weight": {}}}
    with pytest.raises(ValueError, match=r"an entry '9\.weight', which the model does not know"):
        FSDP.rekey_optim_state_dict(strange, OptimStateKeyType.PARAM_ID, plain)
    with pytest.raises(ValueError, match="an entry 9, which"):
        strange = {**expected, "state": {9: {}}}
        FSDP.rekey_optim_state_dict(strange, OptimStateKeyType.PARAM_NAME, plain)
    mixed = {**full, "state": {**full["state"], 0: {}}}
    with pytest.raises(ValueError, match=r"an entry 0, which the model does not know"):
        FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, plain)


class PartlyUsed(nn.Module):
    """Its first layer is never used, so an optimizer has no state for it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.idle = Block(nn.Linear(6, 6))
        self.used = Block(nn.Linear(6, 6))

    def forward(self, x):
        return self.used(x).relu()


@pytest.mark.parametrize("way", WAYS)
@IN_ROWS
@on_ranks(2)
def test_a_parameter_that_has_not_been_used_has_no_state(in_rows, way):
    policy = ModuleWrapPolicy({Block})
    model = FSDP(PartlyUsed().to(device()), auto_wrap_policy=policy, use_orig_params=in_rows)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        model(batch()).sum().backward()
        optimizer.step()
    save, load = WAYS[way]
    saved = save(model, optimizer)
    found = load(saved, model, optimizer)
    assert same(found, optimizer.state_dict()) and 0 not in found["state"]
    optimizer.load_state_dict(found)
    optimizer.step()

"""state_dict_calls.py: an exception in a state dict holds nothing."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from minifsdp.between_steps.state_dict_calls import StateDictCalls
from tests.ranks import on_ranks
from tests.small import Block, layers, stack, step, storage


class Fails(nn.Module):
    broken = True

    def forward(self, x):
        return x

    def get_extra_state(self):
        if self.broken:
            raise KeyError("saving")

    def set_extra_state(self, state):
        raise KeyError("loading")


def with_a_failing_part():
    """In the second unit."""
    import minifsdp

    module = layers(2)
    module[2].append(Fails())
    policy = minifsdp.ModuleWrapPolicy({Block})
    return minifsdp.FullyShardedDataParallel(module, auto_wrap_policy=policy)


def at_rest(model):
    return not model._hooks.summoned and not any(map(storage, model._engine.units))


@on_ranks(2)
def test_a_walk_that_died_ends_when_something_else_begins():
    for begin in (step, dict_of, look):
        model = with_a_failing_part()
        with pytest.raises(KeyError):
            model.state_dict()
        assert not at_rest(model)
        for module in model.modules():
            if isinstance(module, Fails):
                module.broken = False
        with patch.object(model.engine, "start", wraps=model.engine.start) as start:
            begin(model)
        if begin is step:  # a step of its own, and no part of what has died
            assert start.call_count == 1
        assert at_rest(model), begin


def dict_of(model):
    assert len(model.state_dict()) == 7


def look(model):
    with type(model).summon_full_params(model):
        assert model.module[0].weight.shape == (6, 6)


@on_ranks(2)
def test_a_walk_within_a_walk_is_alive():
    model = stack(2)
    held, calls = [], model.engine.layer(StateDictCalls)
    model.module[1].module.register_state_dict_post_hook(
        lambda *_: held.append([unit.name for unit in calls.held])
    )
    assert len(model.state_dict()) == 6
    assert held in ([["", "1"]], [[""]])


@on_ranks(2)
def test_what_was_loaded_by_half_is_dropped():
    model = with_a_failing_part()
    for module in model.modules():
        if isinstance(module, Fails):
            module.broken = False
    before = model.state_dict()
    changed = {n: v + 1 if v is not None else {} for n, v in before.items()}
    with pytest.raises(KeyError):
        model.load_state_dict(changed)
    after = model.state_dict()
    for name in ("0.weight", "0.bias", "2.0.weight", "2.0.bias"):  # around the failure
        assert torch.equal(after[name], before[name]), name

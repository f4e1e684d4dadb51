"""param_changes.py: what a program must not do to parameters, around a forward and its backward."""

import warnings
from unittest.mock import patch

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.checks import param_changes
from minifsdp.support.fingerprint import fingerprint
from tests.ranks import device, on_ranks
from tests.small import batch, stack, step
from tests.test_hooks import STRATEGIES


class Changes(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        if self.how == "in place":
            with torch.no_grad():
                self.bias.zero_()
        elif self.how == "in place, and used":
            with torch.no_grad():
                self.bias.zero_()
            out = out + self.bias  # which autograd refuses, without a name
        elif self.how == "other data":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        elif self.how == "in its data":
            self.weight.data.clamp_(-0.01, 0.01)
        elif self.how == "another":
            self.weight = nn.Parameter(torch.zeros(6, 6))
        return out


CHANGES = [
    ("in place", "changed in place"),
    ("in place, and used", "changed in place"),
    ("other data", "given other data .'weight'.data"),
    ("in its data", "changed in place"),  # seen in the first steps
    ("another", "'weight'"),
]


@pytest.mark.parametrize("how, words", CHANGES)
@on_ranks(2)
def test_what_a_forward_does_to_its_parameters_is_not_lost_without_a_word(how, words):
    module = Changes(6, 6)
    module.how = how
    model = FSDP(nn.Sequential(FSDP(module.to(device()))))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"a parameter of unit '0' was .*{words}.*summon"):
            model(batch())
    module.how = ""
    step(model)


@pytest.mark.parametrize("when", ["before a step", "in a forward"])
@on_ranks(2)
def test_another_flat_parameter_in_its_place_is_refused_by_name(when):
    model = stack(1)
    places = model.module[1].module._parameters
    own, other = places["_flat_param"], nn.Parameter(torch.zeros_like(places["_flat_param"]))
    if when == "before a step":
        places["_flat_param"] = other
    else:
        hook = model.module[0].register_forward_hook(
            lambda *_: places.__setitem__("_flat_param", other)
        )
    with pytest.raises(RuntimeError, match="place of parameter '_flat_param' of unit '1'"):
        model(batch())
    places["_flat_param"] = own
    if when == "in a forward":
        hook.remove()
    step(model)


@on_ranks(2)
def test_a_whole_parameter_that_is_nobody_elses_may_be_changed_in_a_forward():
    module = Changes(6, 6)
    module.how = "in place"
    model = FSDP(module.to(device()), sharding_strategy=ShardingStrategy.NO_SHARD)
    with torch.no_grad():
        model(batch())
    with FSDP.summon_full_params(model):
        assert not model.module.bias.any()


@on_ranks(2)
def test_all_values_are_read_in_the_first_steps_only():
    model, numbers = stack(2), []

    def count(tensors):
        numbers.append(1)
        return fingerprint(tensors)

    step(model)  # compares the units themselves, too
    with patch.object(param_changes, "fingerprint", count):
        step(model)
        assert len(numbers) == 2 * len(model.engine.units)
        step(model)
    assert len(numbers) == 2 * len(model.engine.units)


@on_ranks(2)
def test_autograd_s_refusal_of_a_change_gets_a_name_where_nothing_is_sharded_too():
    module = Changes(6, 6)
    module.how = "in place, and used"
    model = FSDP(module.to(device()), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(RuntimeError, match="a parameter of unit <root> was changed in place"):
        model(batch())


@on_ranks(2)
def test_another_error_stays_what_it_is_and_says_nothing_of_views():
    module = Changes(6, 6)
    model = FSDP(nn.Sequential(FSDP(module.to(device()))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error's traceback has the views
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(batch(5))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_step_between_a_forward_and_its_backward_is_refused(strategy):
    model = stack(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(batch()).sum(), model(batch(step=1)).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="unit <root> were changed in place"):
        second.backward()

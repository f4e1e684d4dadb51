"""wrap.py: where unit borders go."""

import re

import pytest
import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.wrap import check_sharing, select
from tests.models import SharedTransformer
from tests.ranks import device, on_ranks
from tests.small import Block, step


def tree():
    return nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([Block(Block(nn.Linear(4, 4)))]), Block(nn.ReLU())
    )


def test_a_policy_of_classes_selects_inner_modules_first():
    root = tree()
    selected = select(root, ModuleWrapPolicy({Block}))
    assert selected == [root[1][0][0], root[1][0], root[2]]


def test_the_root_itself_and_shared_modules_are_selected_once():
    shared = Block(nn.Linear(4, 4))
    assert select(Block(shared, shared), ModuleWrapPolicy([Block])) == [shared]


def test_a_policy_may_be_a_function_with_torchs_arguments():
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append(nonwrapped_numel)
        return recurse or nonwrapped_numel >= 20

    root = tree()
    selected = select(root, policy)
    assert selected == [root[0], root[1][0][0][0]]  # what they hold is taken: 0 for those around
    assert 20 in asked and 0 in asked


def test_a_policy_takes_classes_only():
    with pytest.raises(TypeError, match=r"classes of nn.Module, not"):
        ModuleWrapPolicy([nn.Linear(1, 1)])


@on_ranks(2)
def test_units_are_where_the_policy_says():
    model = FSDP(tree().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert [unit.name for unit in model.engine.units] == ["", "1.0", "1.0.0", "2"]
    assert [unit.numel for unit in model.engine.units] == [20, 0, 20, 0]


@on_ranks(2)
def test_what_is_wrapped_by_hand_is_left_alone():
    inner = FSDP(Block(Block(nn.Linear(6, 6))).to(device()))
    model = FSDP(nn.Sequential(inner, Block(nn.Linear(6, 6)).to(device())),
                 auto_wrap_policy=ModuleWrapPolicy({Block}))  # fmt: skip
    assert [unit.name for unit in model.engine.units] == ["", "0", "1"]
    assert model.module[0] is inner
    step(model)


@on_ranks(2)
def test_a_module_in_two_places_is_one_unit():
    shared = Block(nn.Linear(6, 6)).to(device())
    model = FSDP(
        nn.Sequential(shared, nn.Tanh(), shared), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    assert model.module[0] is model.module[2] and isinstance(model.module[0], FSDP)
    step(model)
    assert len(list(model.parameters())) == 1


@on_ranks(2)
def test_shared_parameters_inside_a_unit_stay_one_parameter():
    model = FSDP(SharedTransformer().to(device()))
    names = [slot.name for slot in model.engine.root.slots]
    assert "embed.weight" in names and "output.weight" not in names
    with FSDP.summon_full_params(model):
        assert model.module.embed.weight is model.module.output.weight


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.first = Block(nn.Linear(6, 6))
        self.decoder.second = Block(nn.Linear(6, 6))
        self.decoder.second[0].weight = self.decoder.first[0].weight
        self.decoder.forward = lambda x: self.decoder.second(self.decoder.first(x))

    def forward(self, x):
        return self.decoder.forward(x)


@on_ranks(2)
def test_parameters_shared_across_units_are_refused_before_anything_changes():
    model = Tied().to(device())
    with pytest.raises(ValueError) as error:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    message = str(error.value)
    for part in ("'decoder.first.0.weight'", "'decoder.second.0.weight'", "'decoder.first' and "
                 "'decoder.second'", "wrap 'decoder', the smallest module"):  # fmt: skip
        assert part in message
    assert not FSDP.fsdp_modules(model) and isinstance(model.decoder.first[0].weight, nn.Parameter)
    FSDP(model)  # as one unit it is fine


@on_ranks(2)
def test_parameters_shared_with_a_unit_wrapped_by_hand_are_refused():
    model = Tied().to(device())
    model.decoder.first = FSDP(model.decoder.first)
    with pytest.raises(ValueError, match=r"'decoder.first.0.weight' and 'decoder.second.0.weight'"):
        FSDP(model)
    with pytest.raises(ValueError, match="different units"):
        FSDP(model.decoder.second)


def test_a_module_that_sits_in_two_units_is_refused_too():
    shared = nn.Linear(4, 4)
    root = nn.Sequential(Block(shared), Block(shared))
    with pytest.raises(
        ValueError, match=r"'0.0.weight' and '1.0.weight' are one parameter.*the root"
    ):
        check_sharing(root, select(root, ModuleWrapPolicy({Block})))


@on_ranks(2)
def test_an_optimizer_built_before_is_refused_and_one_built_after_trains():
    model = nn.Sequential(nn.Linear(6, 6)).to(device())
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"Adam.* was built before wrapping. It holds 0.weight, 0.bias"
    ):
        FSDP(model)
    del optimizer
    wrapped = FSDP(nn.Sequential(nn.Linear(6, 6)).to(device()))
    before = wrapped.engine.root.shard.detach().clone()
    optimizer = torch.optim.Adam(wrapped.parameters())
    step(wrapped)
    optimizer.step()
    assert not torch.equal(before, wrapped.engine.root.shard)


@on_ranks(2)
def test_somebody_else_who_holds_a_parameter_is_no_optimizer():
    model = nn.Linear(6, 6).to(device())
    held = list(model.parameters())
    FSDP(model)
    assert len(held) == 2


def pair(second):
    return nn.Sequential(nn.Linear(2, 2), second)


REFUSED = {
    "ModuleList has no forward": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "FullyShardedDataParallel already": lambda: FSDP(nn.Linear(2, 2).to(device())),
    "torch.float64: 1.weight, 1.bias": lambda: pair(nn.Linear(2, 2).double()),
    "True: 0.weight, 0.bias; False: 1.weight": lambda: pair(nn.Linear(2, 2).requires_grad_(False)),
}


@pytest.mark.parametrize("match", REFUSED)
@on_ranks(1)
def test_what_cannot_be_a_unit_is_refused(match):
    with pytest.raises(ValueError, match=re.escape(match)):
        FSDP(REFUSED[match]())

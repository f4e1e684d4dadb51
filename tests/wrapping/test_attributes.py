"""attributes.py: a wrapper looks like the module that it wraps."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.featured_engine import FeaturedEngine
from tests.ranks import device, on_ranks
from tests.small import Block, batch, stack, step


class Switched(Block):
    """Its forward reads what programs set from outside."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6))
        self.flag, self._scale = False, 1.0
        self.register_buffer("shift", torch.zeros(6))

    @property
    def scale(self):
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = 2 * value

    def forward(self, hidden, *, mask=None):
        hidden = super().forward(hidden) * self._scale + self.shift
        if hasattr(self, "extra"):
            hidden = self.extra(hidden)
        return -hidden if self.flag else hidden


def switched() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Switched(), nn.Linear(6, 6)).to(device())


def wrapped() -> FSDP:
    return FSDP(switched(), auto_wrap_policy=ModuleWrapPolicy({Switched}))


CHANGES = {
    "an attribute": lambda block: setattr(block, "flag", True),
    "a private one": lambda block: setattr(block, "_scale", 3.0),
    "a property": lambda block: setattr(block, "scale", 3.0),
    "a buffer": lambda block: setattr(block, "shift", torch.ones(6, device=device())),
    "a new buffer": lambda block: block.register_buffer("shift", torch.ones(6, device=device())),
    "a new module": lambda block: setattr(block, "extra", nn.Tanh()),
    "a new module by name": lambda block: block.add_module("extra", nn.Tanh()),
    "a new function": lambda block: setattr(block, "extra", torch.tanh),
    "set and deleted": lambda block: (setattr(block, "extra", nn.Tanh()), delattr(block, "extra")),
    "the mode": lambda block: setattr(block, "training", False),
    "an item": lambda block: block.__setitem__(0, block[0]),
}


@pytest.mark.parametrize("what", CHANGES)
@on_ranks(2)
def test_what_is_set_on_a_wrapper_is_seen_by_the_module(what):
    model, plain = wrapped(), switched()
    for either in (model, plain):
        CHANGES[what](either[0])
    assert torch.equal(step(model), step(plain))
    inner = model[0].module
    for name in ("flag", "_scale", "scale", "training"):
        assert getattr(model[0], name) == getattr(inner, name) == getattr(plain[0], name)
    assert hasattr(model[0], "extra") == hasattr(plain[0], "extra")


@on_ranks(1)
def test_a_parameter_that_is_none_is_registered_with_the_module():
    block = wrapped()[0]
    block.register_parameter("gain", None)
    assert "gain" in block.module._parameters and "gain" not in block._parameters
    assert block.gain is None


@on_ranks(1)
def test_what_is_the_wrappers_stays_with_it():
    model = wrapped()
    before = set(model.module.__dict__)
    model.forward = replaced = torch.tanh
    model._mark = 1  # of some framework
    model.zero_grad()
    model.train(False)
    assert set(model.module.__dict__) == before
    assert model.__dict__["forward"] is replaced and model._mark == 1
    del model.forward, model._mark
    assert not hasattr(model, "_mark") and model.forward.__func__ is FSDP.forward


@on_ranks(1)
def test_a_property_is_not_asked_when_it_is_set():
    class Guarded(nn.Linear):
        def asked(self):
            raise AssertionError

        _guarded = property(asked, lambda self, value: self.__dict__.update(found=value))

    model = FSDP(Guarded(2, 2))
    model._guarded = 3
    assert model.found == 3


@pytest.mark.parametrize("mode", [True, False])
@on_ranks(1)
def test_the_mode_is_the_modules_before_and_after_wrapping(mode):
    model = FSDP(switched().train(mode))
    assert model.training is mode and model.module.training is mode
    model.train(not mode)
    assert model.module[0].training is not mode


SETTERS = {
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(4, 4))),
    "tensor": lambda layer: setattr(layer, "weight", torch.ones(4, 4)),
    "none": lambda layer: setattr(layer, "weight", None),
    "deleted": lambda layer: delattr(layer, "weight"),
    "registered": lambda layer: layer.register_parameter(
        "weight", nn.Parameter(torch.ones(4, 4))
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", SETTERS)
@on_ranks(1)
def test_a_parameter_is_not_set_where_nobody_would_read_it(how):
    model = FSDP(nn.Linear(4, 4).to(device()))
    with pytest.raises(RuntimeError, match=r"'weight' of Linear \(unit <root>\) cannot be set or"):
        SETTERS[how](model)
    with pytest.raises(RuntimeError, match=r"'more' of Linear \(unit <root>\) cannot be set or"):
        model.more = nn.Parameter(torch.ones(4))


@on_ranks(2)
def test_inside_summon_full_params_a_parameter_may_be_set_through_the_wrapper():
    model = FSDP(nn.Linear(4, 4).to(device()))
    with FSDP.summon_full_params(model):
        model.weight = nn.Parameter(torch.full((4, 4), 3.0, device=device()))
    assert (model.state_dict()["weight"] == 3).all()


@on_ranks(1)
def test_the_signature_of_forward_is_the_modules():
    model = wrapped()
    for wrapper in (model, model[0]):
        expected = inspect.signature(wrapper.module.forward)
        assert inspect.signature(wrapper.forward) == expected
    assert list(inspect.signature(model[0].forward).parameters) == ["hidden", "mask"]


@on_ranks(1)
def test_a_subclass_may_have_a_forward_of_its_own():
    class Noted(FSDP):
        def forward(self, *args):
            self.note = "called"
            return super().forward(*args)

    model = Noted(nn.Linear(6, 6).to(device()))
    step(model)
    assert model.note == "called"


@on_ranks(1)
def test_a_missing_attribute_is_reported_with_wrapper_module_and_unit():
    model = stack(1)
    match = r"FullySharded\w+ has no attribute 'wieght', and neither has the Block .*unit '1'"
    with pytest.raises(AttributeError, match=match) as raised:
        _ = model[1].wieght
    assert raised.value.name == "wieght" and raised.value.obj is model[1]
    assert not hasattr(model, "wieght") and getattr(model, "wieght", 3) == 3


@on_ranks(1)
def test_an_engine_of_the_modules_own_comes_first():
    class Car(nn.Linear):
        engine = "diesel"

    model = FSDP(Car(6, 6).to(device()))
    step(model)
    assert model.engine == "diesel" and isinstance(model._engine, FeaturedEngine)
    assert FSDP(nn.Linear(2, 2)).engine.__class__ is FeaturedEngine
    model.engine = "electric"
    assert model.module.engine == model.engine == "electric"


@on_ranks(1)
def test_a_wrapped_container_is_used_like_one():
    model = stack(2)
    assert len(model) == 3 and list(model) == list(model.module) and model
    assert model[1] in model and torch.nn.Tanh not in model
    layer = FSDP(nn.Linear(2, 2))
    assert layer
    with pytest.raises(TypeError):
        len(layer)
    assert model(batch()).shape == (3, 6)


@pytest.mark.parametrize("rows", [False, True])
@on_ranks(2)
def test_the_module_stays_the_same_when_checkpoints_are_put_around_it(rows):
    """As scripts do after wrapping. Their state dicts have to be as before, too."""
    model, plain = (stack(2, use_orig_params=rows) for _ in range(2))
    modules = [model[1].module, model[2].module]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert [model[1].module, model[2].module] == modules
    assert type(model[1]._fsdp_wrapped_module) is not Block
    for either in (model, plain):
        assert step(either).isfinite()
        torch.optim.SGD(either.parameters(), lr=0.1).step()
    expected, found = plain.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in found.items()})
    assert not any(value.any() for value in model.state_dict().values())

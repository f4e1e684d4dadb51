"""param_views.py: what modules see of their parameters, and when."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from minifsdp import CustomPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.pieces import whole
from minifsdp.core.views import make_views, show_views
from minifsdp.support.param_access import ParamInfo, Placeholder
from minifsdp.support.param_views import Placeholders
from minifsdp.support.tensor_attribute import TensorAttribute
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    mean_gradients,
    stack,
    step,
)

STRATEGIES = [s for s in ShardingStrategy if "HYBRID" not in s.name]


class Remembers(nn.Linear):
    """Keeps what it is given under a second name, as an RNN does."""

    def __setattr__(self, name, value):
        if name == "weight":
            self.__dict__["other"] = value
        super().__setattr__(name, value)


def of(*infos):
    """A unit of these parameters, and what their modules have."""
    return SimpleNamespace(
        param_infos=infos,
        placeholders=["hidden"] * len(infos),
        mesh=None,
        module=nn.Module(),
        sharded_flat_param=None,
        has_placeholders=False,
        kept_views=[],
        leaks=0,
    )


@pytest.mark.direct
def test_all_owners_see_a_view_and_a_placeholder():
    first, second = nn.Linear(2, 2), Remembers(2, 2)
    weight = first.weight
    owners = [TensorAttribute(first, "weight"), TensorAttribute(second, "weight")]
    info = ParamInfo("first.weight", weight.shape, owners)
    assert info.parameter is weight
    for owner in (first, second):
        del owner.weight
    value, unit, places = torch.ones(2, 2), of(info), Placeholders([info])
    places.show(unit, [value])
    assert first.weight is second.weight is second.other is value
    assert all(dict(owner.named_parameters())["weight"] is value for owner in (first, second))
    places.hide(unit)
    assert first.weight == second.weight == second.other == "hidden"
    assert all("weight" not in dict(owner.named_parameters()) for owner in (first, second))


@pytest.mark.direct
def test_parameters_keep_their_order_and_what_was_put_in_their_place_is_refused():
    """The order in which a unit lists shared parameters may be another one than a module's."""
    module = nn.Linear(2, 2)
    names = list(module._parameters)
    infos = [
        ParamInfo(name, module._parameters[name].shape, [TensorAttribute(module, name)])
        for name in reversed(names)
    ]
    values, unit, places = [info.parameter for info in infos], of(*infos), Placeholders(infos)
    places.hide(unit)
    places.show(unit, values)
    assert list(dict(module.named_parameters())) == names == ["weight", "bias"]
    places.hide(unit)
    del module.__dict__["weight"]
    with pytest.raises(RuntimeError, match="'weight' was replaced after wrapping"):
        places.show(unit, values)


@pytest.mark.direct
class TestDirectly:
    def test_gathered_modules_have_views_in_the_places_of_their_parameters(self):
        with lone_unit() as lone:
            lone.fill()
            make_views(lone.unit)
            show_views(lone.unit)
            named = dict(lone.module.named_parameters())
            assert list(named) == ["weight", "scale", "bias"]
            assert named["weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
            assert named["scale"].tolist() == 7 and named["bias"].tolist() == [8, 9, 10]
            lone.module.scale.mul(3).backward()
            grad = whole(lone.unit.view_maker.take_gradient(lone.unit))
            assert grad.tolist() == [0] * 6 + [3] + [0] * 3, "gradients arrive flat"

    def test_sharded_modules_have_placeholders_and_the_flat_parameter(self):
        with lone_unit() as lone:
            assert [name for name, _ in lone.module.named_parameters()] == ["_flat_param"]
            assert isinstance(lone.module.weight, Placeholder)
            assert lone.module.weight.shape == (2, 3)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@on_ranks(2)
def test_parameters_are_flat_between_forwards_and_named_in_them(strategy):
    model, seen = stack(2, sharding_strategy=strategy), []
    block = model.module[1].module
    block.register_forward_hook(lambda *_: seen.append([n for n, _ in block.named_parameters()]))

    def check():
        assert {n for n, _ in model.named_parameters()} == {
            "_flat_param", "1._flat_param", "2._flat_param"
        }  # fmt: skip
        assert {n for n, _ in model.module.named_parameters(recurse=False)} == {"_flat_param"}
        assert all(p.is_leaf for p in model.parameters())

    check()
    for _ in range(2):
        loss = model(batch()).sum()
        check()  # also what is kept for the backward
        loss.backward()
        check()
    assert seen == [["0.weight", "0.bias"]] * 2


@on_ranks(2)
def test_in_a_forward_parameters_come_in_their_own_order():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.b, self.a = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x + torch.cat([p for p in self.parameters()]).sum()

    model, seen = FSDP(Odd().to(device())), []
    inner = model.module
    inner.register_forward_hook(lambda *_: seen.append([n for n, _ in inner.named_parameters()]))
    model(batch())
    assert seen == [["b", "a"]]


@on_ranks(2)
def test_what_a_move_puts_in_a_shards_place_is_taken_over_wherever_it_was_asked_for():
    model = stack(1)
    model.module.double()  # not through the wrapper
    assert model(batch().double()).dtype is torch.float64
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.engine.units[1].module.to("meta")
    assert model.engine.units[1].module._flat_param.is_meta


@on_ranks(2)
def test_what_was_moved_is_listed_at_once():
    model = stack(1)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert all(unit.module._flat_param is unit.sharded_flat_param for unit in model.engine.units)


@on_ranks(2)
def test_after_a_backward_that_died_parameters_are_flat_again():
    model = stack(2)
    out = model(batch())
    out.register_hook(lambda grad: (_ for _ in ()).throw(KeyError("boom")))
    inner = model.module[1].module[0]
    handle = inner.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(KeyError("boom")))
    with pytest.raises(KeyError):
        out.sum().backward()
    handle.remove()
    assert type(inner.weight) is Placeholder
    assert all(p.is_leaf for p in model.module.parameters())
    torch.optim.SGD(model.module.parameters(), lr=0.1)
    step(model)


class Checkpoint(torch.autograd.Function):
    """As in the U-Net of latent diffusion models: it is given the parameters, keeps them, and asks
    for their gradients when it has run the function again. Those without one are left out."""

    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.function, ctx.kept = function, (x, *params)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.kept
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        del ctx.kept
        return None, *torch.autograd.grad(output, (x, *params), grad, allow_unused=True)


class Checkpointed(Block):
    def forward(self, x):
        return Checkpoint.apply(super().forward, x, *self.parameters())


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("part", [False, True])
@on_ranks(2)
def test_a_checkpoint_that_keeps_parameters_gets_their_gradients(part, rows):
    """What it runs again has to compute with the tensors that it was given in the forward, whether
    it is the unit or in it."""

    def loss_of(model, at):
        return (model(batch(step=at)) * model(batch(step=at + 9))).sum()  # two calls of each

    def make():
        torch.manual_seed(0)
        blocks = [Checkpointed(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
        blocks = [Block(block, nn.Linear(6, 6)) for block in blocks] if part else blocks
        return nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 6)).to(device())

    plain = make()
    policy = CustomPolicy(lambda module: type(module) is (Block if part else Checkpointed))
    model = FSDP(make(), auto_wrap_policy=policy, use_orig_params=rows)
    for at in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a parameter of unit .* is still referred to")
            loss_of(model, at).backward()
        expected = mean_gradients(plain, loss_of(plain, at))
        assert_same_gradients(gathered_gradients(model), expected)
        assert not any(unit.kept_views for unit in model.engine.units)

"""Promises to programs that compute with other weights for one call: ``torch.func.functional_call``
and what writes to ``module._parameters``. Such a call is right, or refused by name on every rank,
and afterwards the model goes on as if it had not been."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from tests.promises import Block, fsdp
from tests.ranks import device, on_ranks

LAYOUTS = ["chunks", "rows", "fully_shard"]


class Layer(Block):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class Model(nn.Module):
    """Its layers are called with other weights, if it has some for them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layers = nn.Sequential(Layer(), Layer())
        self.for_last, self.for_layer = None, None

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) if self.for_layer is None else functional_call(layer, self.for_layer, x)
        for_last = {} if self.for_last is None else self.for_last
        return functional_call(self.last, for_last, x)


def build(seed=0):
    torch.manual_seed(seed)
    return Model().to(device())


def sharded(layout, seed=0):
    model = build(seed)
    if layout == "fully_shard":
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)
    return fsdp(use_orig_params=layout == "rows")(model)


def weights(*names, seed=1):
    """Some or all of another model, to be trained."""
    named = build(seed).named_parameters()
    return {name: p.detach().requires_grad_() for name, p in named if not names or name in names}


def batch():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(3, 6, generator=generator).to(device())


def inner(model):
    return model.module if isinstance(model, FSDP) else model


def losses(model, steps=2):
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        found.append(model(batch()).pow(2).sum())
        found[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found).detach()


def all_weights(model):
    given = weights()
    return given, lambda: functional_call(model, given, batch())


def one_of_the_root(model):
    given = weights("last.bias")
    return given, lambda: functional_call(model, given, batch())


def one_of_a_unit(model):
    given = weights("layers.1.linear.weight")
    return given, lambda: functional_call(model, given, batch())


def a_unit_in_a_forward(model):
    given = {"linear.weight": torch.zeros(6, 6, device=device())}

    def run():
        inner(model).for_layer = given
        try:
            model(batch())
        finally:
            inner(model).for_layer = None

    return given, run


def its_own_times_two(model):
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    return given, lambda: functional_call(model, given, batch())


def by_hand(model):
    """With whole parameters in their places."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return all_weights(model)


CALLS = {
    "all": (all_weights, "'first.weight' of unit <root>"),
    "one of the root": (one_of_the_root, "'last.bias' of unit <root>"),
    "one of a unit": (one_of_a_unit, "'linear.weight' of unit 'layers.1'"),
    "a unit in a forward": (a_unit_in_a_forward, "'linear.weight' of unit 'layers.0'"),
    "its own times two": (its_own_times_two, "'(_flat_param|first.weight)' of"),
    "by hand": (by_hand, "'first.weight' of unit <root>"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_call_of_a_sharded_model_is_refused_and_changes_nothing(layout, call):
    expected, model = sharded(layout), sharded(layout)
    program, words = CALLS[call]
    for context in (nullcontext, torch.no_grad) * 2:  # before the first step, and after some
        given, run = program(model)
        before = dict(given)
        refused = pytest.raises(RuntimeError, match=rf"{words}(?s:.*)plain module of the same")
        with refused, context():
            run()
        assert all(given[name] is value for name, value in before.items())
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        assert torch.equal(losses(model), losses(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_a_part_of_a_unit_may_be_called_in_its_forward(layout):
    found = []
    for model in (build(), sharded(layout)):
        given = weights("last.weight", "last.bias")
        own = {name.removeprefix("last."): value for name, value in given.items()}
        inner(model).for_last = own
        output = model(batch())
        output.sum().backward()
        found.append((output, *(value.grad for value in given.values())))
        assert all(value.grad is not None for value in given.values())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_other_buffers_are_computed_with(layout):
    plain, model = build().eval(), sharded(layout).eval()
    given = {"layers.1.norm.running_mean": torch.full((6,), 3.0, device=device())}
    with torch.no_grad():
        before = model(batch())
        assert torch.equal(before, plain(batch()))
        found = functional_call(model, dict(given), batch())
        assert torch.equal(found, functional_call(plain, given, batch()))
        assert not torch.equal(found, before) and torch.equal(model(batch()), before)


@pytest.mark.parametrize("layout", ["chunks", "rows"])
@on_ranks(2)
def test_in_summon_full_params_a_model_computes_with_other_weights(layout):
    plain, model = build().eval(), sharded(layout).eval()
    with torch.no_grad():
        expected, own = functional_call(plain, weights(), batch()), plain(batch())
        with FSDP.summon_full_params(model):
            assert torch.equal(functional_call(model, weights(), batch()), expected)
            assert torch.equal(functional_call(model.module, weights(), batch()), expected)
            assert torch.equal(model(batch()), own)
        assert torch.equal(model(batch()), own)


@on_ranks(2)
def test_the_remedy_works_with_gradients():
    model, given, expected = sharded("chunks"), weights(), weights()
    with torch.device("meta"):
        skeleton = Model()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    functional_call(skeleton, {**given, **buffers}, batch()).sum().backward()
    functional_call(build(), expected, batch()).sum().backward()
    assert all(torch.equal(given[name].grad, expected[name].grad) for name in given)


class Uncalled(nn.Module):
    """Computes with the weight of a module inside of it, and does not call that one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.linear.weight)


@pytest.mark.parametrize("layout", ["chunks", "rows"])
@on_ranks(2)
def test_the_weights_of_a_module_that_is_not_called_are_looked_at_too(layout):
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(Uncalled().to(device()), auto_wrap_policy=policy, use_orig_params=layout == "rows")
    other = torch.zeros(6, 6, device=device())
    with torch.no_grad():
        before = model(batch())
        params = model.linear.module._parameters
        own, params["weight"] = params["weight"], other
        with pytest.raises(RuntimeError, match="'weight' of unit 'linear' there is another"):
            model(batch())
        params["weight"] = own
        assert torch.equal(model(batch()), before)


SHARDS = {
    "tensors": lambda shard, other: shard.detach() * 2,
    "parameters": lambda shard, other: nn.Parameter(shard.detach() * 2),
    "those of another model": lambda shard, other: other,
}


@pytest.mark.parametrize("kind", SHARDS)
@on_ranks(2)
def test_other_shards_are_refused(kind):
    """The units of a plain model. They have the flat parameters in their own places."""

    def units(seed):
        model = build(seed)
        for position, layer in enumerate(model.layers):
            model.layers[position] = FSDP(layer)
        return model

    model, expected = units(0), units(0)
    pairs = zip(model.named_parameters(), units(0).parameters(), strict=True)
    given = {name: SHARDS[kind](shard, other) for (name, shard), other in pairs}
    given = {name: value for name, value in given.items() if "_flat_param" in name}
    assert len(given) == 2
    with pytest.raises(RuntimeError, match=r"'_flat_param' of unit <root> there is another tensor"):
        functional_call(model, given, batch())
    assert torch.equal(losses(model), losses(expected))


@pytest.mark.parametrize("layout", ["rows", "fully_shard"])
@on_ranks(2)
def test_with_rows_a_parameter_that_was_set_to_none_is_missed(layout):
    model = sharded(layout)
    inner(model).last.bias = None
    with pytest.raises(RuntimeError, match=r"parameter 'last.bias' of unit <root> there is None"):
        model(batch())


@on_ranks(2)
def test_a_dtensor_for_a_module_that_is_a_unit_itself_is_no_fsdp_of_torchs():
    linear = FSDP(nn.Linear(6, 6).to(device()), use_orig_params=True)
    model = FSDP(nn.Sequential(linear), use_orig_params=True)
    given = {"0.weight": linear.weight.detach() * 2}
    with pytest.raises(RuntimeError, match=r"'weight' of Linear \(unit '0'\) cannot be set"):
        functional_call(model, given, batch())

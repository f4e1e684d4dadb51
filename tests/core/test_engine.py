"""engine.py: *when* units are gathered and freed, which results alone do not show."""

from contextlib import contextmanager, suppress
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp.core import (
    BackwardPrefetch,
    ForwardPrefetch,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from minifsdp.core import parameters as verbs
from minifsdp.core.unit_state import ShardedState

from .common import Block, batch, full_gradients, full_parameters, mlp, on_ranks, sharded

PRE, POST = ForwardPrefetch.FORWARD_PRE, ForwardPrefetch.FORWARD_POST


@contextmanager
def watch():
    """A log of what is done to units: '+1' for a gather of the unit '1', '-1' when it is freed."""
    log = []

    def noted(sign, verb):
        def call(unit, streams):
            log.append(sign + (unit.name or "root"))
            return verb(unit, streams)

        return call

    gather, free = noted("+", verbs.unshard), noted("-", verbs.reshard)
    with patch.object(verbs, "unshard", gather), patch.object(verbs, "reshard", free):
        yield log


def steps(count=3, between=False, **settings):
    """The logs of the forward and the backward of the last of so many steps; with a '|' where what
    is ``between`` blocks would be computed."""
    settings.setdefault("forward_prefetch", False)
    settings.setdefault("backward_prefetch", None)
    model = sharded(mlp(), **settings)

    def mark(block, inputs, output):
        forward.append("|")
        output.register_hook(lambda grad: backward.append("|"))

    for module in model.modules() if between else ():
        if module is not model and isinstance(module, type(model)):
            module.register_forward_hook(mark)
    for at in range(count):
        with watch() as forward:
            loss = model(batch(at)).sum()
        with watch() as backward:
            loss.backward()
    return " ".join(forward), " ".join(backward)


@on_ranks(2)
def test_without_prefetching_one_unit_is_there_beside_the_root():
    forward, backward = steps()
    assert forward == "+root +1 -1 +2 -2 +3 -3"
    assert backward == "+3 -3 +2 -2 +1 -1 -root"


@on_ranks(2)
def test_what_comes_next_is_gathered_before_the_computation_or_after_it():
    forward, backward = steps(between=True)
    assert forward == "+root +1 -1 | +2 -2 | +3 -3 |"
    assert backward == "| +3 -3 | +2 -2 | +1 -1 -root"
    for count in (2, 3):  # the order of the last step, and not that of all of them
        forward, _ = steps(count, between=True, forward_prefetch=PRE)
        assert forward == "+root +1 +2 -1 | +3 -2 | -3 |"
        forward, _ = steps(count, between=True, forward_prefetch=POST)
        assert forward == "+root +1 -1 +2 | -2 +3 | -3 |"
    for count in (1, 2, 3):  # in the first step the reverse of the forward's order
        _, backward = steps(count, between=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)
        assert backward == "+3 | +2 -3 | +1 -2 | -1 -root"
        _, backward = steps(count, between=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
        assert backward == "| +3 -3 +2 | -2 +1 | -1 -root"


@on_ranks(2)
def test_a_limit_declines_prefetches_and_no_limit_admits_them():
    forward, backward = steps(
        forward_prefetch=PRE,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=1,
    )
    assert forward == "+root +1 -1 +2 -2 +3 -3"
    assert backward == "+3 -3 +2 -2 +1 -1 -root"
    forward, _ = steps(forward_prefetch=PRE, limit_all_gathers=False)
    assert forward == "+root +1 +2 -1 +3 -2 -3"


@on_ranks(2)
def test_by_strategy_units_stay_from_forward_to_backward():
    forward, backward = steps(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert forward == "+root +1 +2 +3"
    assert backward == "-3 -2 -1 -root"
    assert steps(sharding_strategy=ShardingStrategy.NO_SHARD) == ("", "")


@on_ranks(2)
def test_without_gradients_nothing_stays():
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = sharded(mlp(), sharding_strategy=strategy)
        with torch.no_grad():
            model(batch())
        assert all(unit.unsharded.storage.size() == 0 for unit in model.engine.units)


class Skips(nn.Module):
    """Its second block may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(nn.Linear(3, 3)), Block(nn.Linear(3, 3))

    def forward(self, x, skip):
        x = self.first(x)
        return x if skip else self.second(x)


@on_ranks(2)
def test_what_was_gathered_ahead_and_is_not_used_is_freed_with_the_end_of_the_forward():
    model = sharded(Skips(), forward_prefetch=PRE)
    model(batch(), skip=False).sum().backward()
    with watch() as log:
        loss = model(batch(1), skip=True).sum()
    assert log == ["+first", "+second", "-first", "-second"]
    loss.backward()


class Masked(Block):
    """Has a second input, which needs no gradient."""

    def forward(self, x, mask):
        return super().forward(x) * mask


class OverFrozen(nn.Module):
    """A block, a frozen one with two inputs, another block."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(nn.Linear(3, 3)), Block(nn.Linear(3, 3))
        self.frozen = Masked(nn.Linear(3, 3)).requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.first(x), torch.ones(3)))


@on_ranks(2)
def test_a_frozen_unit_is_freed_when_its_inputs_have_their_gradients():
    policy = ModuleWrapPolicy({Block, Masked})
    model = sharded(OverFrozen(), auto_wrap_policy=policy, backward_prefetch=None)
    loss = model(batch()).sum()
    with watch() as log:
        loss.backward()
    assert log == ["+last", "-last", "+frozen", "-frozen", "+first", "-first"]


class Compares(OverFrozen):
    """Runs its frozen block also on what it returns, without a gradient."""

    def forward(self, x):
        x = super().forward(x)
        with torch.no_grad():
            self.frozen(x, torch.ones(3))
        return x


@on_ranks(2)
def test_a_frozen_unit_does_not_wait_for_inputs_of_a_forward_without_gradients():
    settings = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None}
    model = sharded(Compares(), auto_wrap_policy=ModuleWrapPolicy({Block, Masked}), **settings)
    loss = model(batch()).sum()
    with watch() as log:
        loss.backward()
    assert log == ["-last", "-frozen", "-first"]


class Keeps(nn.Module):
    """Computes with layers of its own before and after a block, whose output it keeps."""

    def __init__(self):
        super().__init__()
        self.before, self.block = nn.Linear(3, 3), Block(nn.Linear(3, 3))
        self.after = nn.Linear(3, 3)

    def forward(self, x):
        self.kept = self.block(self.before(x))
        return self.after(self.kept)


@on_ranks(2)
def test_a_second_backward_from_a_part_begins_with_the_units_around_it():
    model = sharded(Keeps(), backward_prefetch=None)
    model(batch()).sum().backward(retain_graph=True)
    with watch() as log:
        model.kept.sum().backward()
    assert log == ["+root", "+block", "-block", "-root"]


@on_ranks(2)
def test_views_are_made_once_for_each_forward():
    model = sharded(mlp())
    unit = model.engine.units[1]
    make, made = unit.view_maker.make, []
    unit.view_maker.make = lambda unit: made.append(unit.name) or make(unit)
    for _ in range(2):
        model(batch()).sum().backward()
    assert made == ["1", "1"]


@on_ranks(2)
def test_a_unit_is_freed_before_its_gradient_is_sent():
    model = sharded(mlp(1), forward_prefetch=False, backward_prefetch=None)
    unit = model.engine.units[1]
    sizes = []
    send = unit.comm.reduce_scatter

    def noted(*args):
        sizes.append(unit.unsharded.storage.size())
        return send(*args)

    unit.comm.reduce_scatter = noted
    model(batch()).sum().backward()
    assert sizes == [0]


@on_ranks(2)
def test_a_reason_keeps_a_unit_until_it_is_gone():
    model = sharded(mlp())
    unit = model.engine.units[1]
    unit.hold("somebody looks at it")
    loss = model(batch()).sum()
    assert unit.reasons == {"somebody looks at it"}
    assert unit.state.sharded is ShardedState.UNSHARDED
    loss.backward()
    assert unit.unsharded.storage.size() == unit.unsharded.nbytes
    unit.let_go("somebody looks at it")
    assert unit.unsharded.storage.size() == 0


class Fails(nn.Module):
    """The identity, which raises in its forward or in its backward."""

    def __init__(self):
        super().__init__()
        self.where = None

    def forward(self, x):
        if self.where == "forward":
            raise ArithmeticError("in the forward")
        if self.where == "backward":
            x.register_hook(self.fail)
        return x

    @staticmethod
    def fail(grad):
        raise ArithmeticError("in the backward")


@on_ranks(2)
def test_after_a_failure_nothing_of_the_step_is_left():
    """Gradients are handed over all or none, and the next step is as if it had been the first."""
    for where in ("forward", "backward"):
        parts = [*mlp()]
        fails = Fails()
        parts[2] = Block(*parts[2], fails)
        model, expected = sharded(nn.Sequential(*parts)), sharded(mlp())
        fails.where = where
        with suppress(ArithmeticError):
            model(batch()).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        if where == "forward":  # at once; of a backward the next step notices it
            assert all(unit.unsharded.storage.size() == 0 for unit in model.engine.units)
        fails.where = None
        for one in (model, expected):
            one(batch(1)).sum().backward()
        found = full_gradients(model)
        for name, grad in full_gradients(expected).items():
            assert torch.equal(found[name], grad), (where, name)
        assert all(unit.unsharded.storage.size() == 0 for unit in model.engine.units)
        assert all(not unit.reasons for unit in model.engine.units)


@on_ranks(2)
def test_a_forward_that_has_failed_predicts_nothing():
    parts, fails = [*mlp()], Fails()
    parts[2] = Block(*parts[2], fails)
    model = sharded(nn.Sequential(*parts), forward_prefetch=PRE)
    model(batch()).sum().backward()
    fails.where = "forward"
    with pytest.raises(ArithmeticError):
        model(batch(1))
    fails.where = None
    with watch() as log:
        loss = model(batch(2)).sum()
    assert " ".join(log) == "+root +1 +2 -1 +3 -2 -3"
    loss.backward()


class InParts(Block):
    """Its gradient comes from a reentrant checkpoint, and what follows it in the backward fails."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3))
        self.fails = Fails()

    def forward(self, x):
        return checkpoint(self[0], self.fails(x), use_reentrant=True)


@on_ranks(2)
def test_a_gradient_that_has_come_in_part_is_dropped_with_its_backward():
    model = sharded(nn.Sequential(nn.Linear(3, 3), InParts()), auto_wrap_policy=None)
    expected = sharded(nn.Sequential(nn.Linear(3, 3), InParts()), auto_wrap_policy=None)
    expected.load_state_dict(model.state_dict())
    model.engine.root.module[1].fails.where = "backward"
    with suppress(ArithmeticError):
        model(batch()).sum().backward()
    model.engine.root.module[1].fails.where = None
    for one in (model, expected):
        one(batch(1)).sum().backward()
    found = full_gradients(model)
    for name, grad in full_gradients(expected).items():
        assert torch.equal(found[name], grad), name


@on_ranks(2)
def test_autograd_may_let_go_late_of_a_backward_that_has_failed():
    """On a GPU its own thread does, when the program has been told already."""
    parts, kept, fails = [*mlp()], [], Fails()
    parts[2] = Block(*parts[2], fails)
    model, expected = sharded(nn.Sequential(*parts)), sharded(mlp())
    fails.fail = lambda grad: (kept.append(model._hooks.backward.queued()), 1 / 0)
    fails.where = "backward"
    with pytest.raises(ZeroDivisionError):
        model(batch()).sum().backward()
    fails.where = None
    assert kept, "it is not over for autograd"
    for one in (model, expected):
        one(batch(1)).sum().backward()
    found = full_gradients(model)
    for name, grad in full_gradients(expected).items():
        assert torch.equal(found[name], grad), name


@on_ranks(2)
def test_a_part_that_fails_and_is_caught_is_freed_at_once():
    fails = Fails()
    fails.where = "forward"
    model = nn.Sequential(nn.Linear(3, 5), Block(nn.Linear(5, 5), fails))

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with pytest.raises(ArithmeticError):
                self.model(x)
            return self.model[0](x)

    root = sharded(Catches())
    root(batch()).sum().backward()
    assert root.engine.units[1].unsharded.storage.size() == 0


@on_ranks(2)
def test_gradients_come_all_at_once():
    model = sharded(mlp())
    seen = []
    model.engine.units[1].module[0].register_full_backward_hook(
        lambda *_: seen.append([param.grad for param in model.parameters()])
    )
    model(batch()).sum().backward()
    assert seen == [[None] * 4]
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_parameters_are_shards_and_keep_their_values():
    plain, model = mlp(), sharded(mlp())
    total = sum(param.numel() for param in plain.parameters())
    own = sum(param.numel() for param in model.parameters())
    assert total / 2 - 4 <= own <= total / 2 + 4
    found = full_parameters(model)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())

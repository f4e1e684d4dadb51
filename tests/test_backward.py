"""backward.py: the moments of a backward, and one that fails."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.core.unit_state import TrainingState
from tests.parity import check_at_rest
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    stack,
    step,
    watch,
)
from tests.support.test_unsharded_storage import TwoEnds
from tests.test_hooks import (
    Aside,
    Boom,
    check_gradients,
    check_training_goes_on,
    every_strategy,
    fragile,
    wrap,
)


@every_strategy
@on_ranks(2)
def test_two_forwards_then_two_backwards(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    for order in ((0, 1), (1, 0)):
        model.zero_grad()
        losses = [model(batch(step=i)).pow(2).sum() for i in range(2)]
        for i in order:
            losses[i].backward()
            check_at_rest(model)
        expected = mean_gradients(plain, *[plain(batch(step=i)).pow(2).sum() for i in range(2)])
        assert_same_gradients(gathered_gradients(model), expected)


@every_strategy
@on_ranks(2)
def test_a_backward_twice_through_one_graph(strategy):
    model, plain = stack(sharding_strategy=strategy), layers()
    loss = model(batch()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    expected = mean_gradients(plain, 2 * plain(batch()).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)


@every_strategy
@on_ranks(2)
def test_a_loss_from_a_childs_output_alone(strategy):
    def run(model):
        model(batch())
        return [model.kept.pow(2).sum()]

    check_gradients(Aside, run, sharding_strategy=strategy)


@on_ranks(2)
def test_a_loss_from_the_middle_of_a_unit_in_a_unit():
    """The outer unit's own output is not part of the graph, but its first layers are."""

    class Stage(Block):
        def forward(self, x):
            self.kept = self[2](self[1](self[0](x)))
            return self.kept.detach()

    def make():
        return nn.Sequential(
            nn.Linear(6, 6), Stage(nn.Linear(6, 6), nn.LayerNorm(6), Block(nn.Linear(6, 6)))
        )

    def run(model):
        model(batch())
        return [model[1].kept.pow(2).sum()]

    torch.manual_seed(0)
    plain = make().to(device())
    torch.manual_seed(0)
    model = FSDP(make().to(device()), auto_wrap_policy=ModuleWrapPolicy({Stage, Block}))
    run(model)[0].backward()
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *run(plain)))
    check_at_rest(model)


@on_ranks(2)
def test_a_units_gradient_is_complete_before_the_next_backward_begins():
    """In later steps, too: views from an earlier one would be differentiated last of all."""
    model = stack(3, backward_prefetch=None)
    for at in range(3):
        loss = model(batch(step=at)).sum()
        with watch(model) as log:
            loss.backward()
        assert log == ["-root", "+3", "-3", "+2", "-2", "+1", "-1"]


@on_ranks(2)
def test_ranks_may_begin_with_different_outputs_of_the_same_units():
    """The inner unit's output is the root's as well, and hears of its gradient first."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.block = Block(nn.Linear(6, 6))

        def forward(self, x):
            side = self.block(self.first(x))
            return self.last(side).sum(), side

    torch.manual_seed(0)
    plain = Model().to(device())
    torch.manual_seed(0)
    model = wrap(Model().to(device()))
    for _ in range(2):
        model.zero_grad()
        model(batch())[dist.get_rank()].sum().backward()
        losses = [out.sum() for out in plain(batch())]
        losses[1 - dist.get_rank()] *= 0
        assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))
        check_at_rest(model)


@every_strategy
@on_ranks(2)
def test_an_exception_in_backward_then_training_goes_on(strategy):
    """torch's FSDP1 trains on, wrongly and without a word."""
    model, plain = fragile(strategy)
    step(model)
    model.zero_grad()
    Boom.armed = True
    try:
        with pytest.raises(ValueError, match="boom in backward"):
            step(model)
    finally:
        Boom.armed = False
    assert all(param.grad is None for param in model.parameters())  # all of a backward, or nothing
    check_training_goes_on(model, plain)


@on_ranks(2)
def test_an_exception_in_backward_then_another_backward_at_once():
    model, plain = fragile(ShardingStrategy.FULL_SHARD)
    doomed, other = model(batch()).pow(2).sum(), model(batch(step=1)).pow(2).sum()
    Boom.armed = True
    try:
        with pytest.raises(ValueError, match="boom in backward"):
            doomed.backward()
    finally:
        Boom.armed = False
    other.backward()
    expected = mean_gradients(plain, plain(batch(step=1)).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)
    check_at_rest(model)


@on_ranks(2)
def test_a_backward_that_died_halfway_does_not_say_what_comes_next():
    """Prefetches follow the order of the last backward that came to its end."""
    model, backwards = stack(3), []
    for at in range(4):
        handle = model.module[2].register_full_backward_hook(interrupt) if at == 2 else None
        loss = model(batch(step=at)).sum()
        with watch(model) as log, suppress(InterruptedError):
            loss.backward()
        backwards.append(log)
        if handle is not None:
            handle.remove()
    assert backwards[0] == backwards[1] == backwards[3]
    assert backwards[3] == ["+3", "-root", "+2", "-3", "+1", "-2", "-1"]
    assert backwards[2] != backwards[1]


def interrupt(*_):
    raise InterruptedError


@on_ranks(2)
def test_a_backward_in_which_ranks_go_apart_does_not_say_what_comes_next():
    model = FSDP(TwoEnds().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}))
    order = model.engine.prefetcher.pre_backward_order
    sum(model(batch())).backward()
    assert order.current
    model(batch())[dist.get_rank()].backward()
    assert order.current == []


@on_ranks(2)
def test_a_gradient_that_a_forward_asks_for_leaves_its_parameters_there():
    class Slope(Block):
        def forward(self, x):
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(self[0](x).sum(), x)[0]
            return self[1](x) + slope

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Slope(nn.Linear(6, 6), nn.Linear(6, 6))).to(device())

    plain, model = make(), wrap(make())
    assert torch.equal(model(batch()), plain(batch()))


@on_ranks(2)
def test_gradients_asked_of_autograd_directly_are_not_silently_none():
    model = stack()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
    model.zero_grad()
    step(model)
    check_at_rest(model)


@on_ranks(2)
def test_phases_come_in_order():
    model = stack(2)
    unit = model.engine.units[1]
    assert unit.state.training is TrainingState.IDLE
    loss = model(batch()).sum()
    assert unit.state.training is TrainingState.FORWARD
    seen = []
    model.module[1].module[0].register_full_backward_hook(
        lambda *_: seen.append(unit.state.training)
    )
    loss = model(batch()).sum()
    loss.backward()
    assert seen == [TrainingState.PRE_BACKWARD] and unit.state.training is TrainingState.FORWARD


@on_ranks(2)
def test_a_gradient_is_taken_once():
    model = stack()
    step(model)
    assert model.engine.stats.reductions == 5  # the root's and four units'
    assert not any(unit.view_maker.has_gradient(unit) for unit in model.engine.units)

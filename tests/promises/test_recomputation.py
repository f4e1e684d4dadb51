"""Promises about activation checkpoints, modes of a program, and graphs from before a step."""

import time
from contextlib import nullcontext
from functools import partial
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from minifsdp import MixedPrecision, ShardingStrategy
from tests.promises import WAYS, Averaged, Block, batch, ddp, fsdp, parameters, same, seeded, train
from tests.ranks import on_ranks

ways = pytest.mark.parametrize("way", WAYS)


def square(model, x):
    return model(x).pow(2).sum()


class Two(Block):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))


class Outer(Block):
    """A unit with parameters of its own around another unit."""

    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(6, 6), Two(), nn.Linear(6, 6)

    def forward(self, x):
        return self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


class Model(nn.Module):
    def __init__(self, kind=Two, around=None):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks, self.around = nn.ModuleList(kind() for _ in range(3)), around

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.last(x)


# ------------------------------------------------------------- checkpoints as hooks of the modules


@ways
@pytest.mark.parametrize("kind", [Two, Outer])
@pytest.mark.parametrize("early_stop", [True, False])
@on_ranks(2)
def test_composable_checkpoints(way, kind, early_stop):
    """Of a unit's module, of one that is used twice, and of a part of a unit."""

    def program(wrap):
        model = Model(kind)
        model.blocks[2] = model.blocks[0]
        for part in (*model.blocks[:2], model.last):
            composable_checkpoint(part, early_stop=early_stop)
        return train(wrap(model), square)

    same(program, wrap=WAYS[way])


# -------------------------------------------------------- checkpoints that keep some operations


# From 2.14 on torch asks whether what such a checkpoint keeps goes through hooks, as ours are.
ASKS = "respect_saved_tensors_hooks" in signature(checkpoint).parameters
HOOKED = [{"respect_saved_tensors_hooks": hooked} for hooked in (False, True)] if ASKS else [{}]


@ways
@pytest.mark.parametrize("hooked", HOOKED, ids=lambda hooked: " ".join(map(str, hooked.values())))
@pytest.mark.parametrize("kind", [Two, Outer])
@pytest.mark.parametrize("late", [0, 1])
@on_ranks(2)
def test_selective_checkpoints_around_units(way, kind, late, hooked):
    """Whichever rank is late, and so whatever the engine waits for in the recomputation."""

    def keep(context, operation, *args, **kwargs):
        kept = operation in (torch.ops.aten.clone.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        time.sleep(0.01 * (dist.get_rank() == late))
        return create_selective_checkpoint_contexts(keep)

    def around(block, x):
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts, **hooked)

    same(lambda wrap: train(wrap(Model(kind, around)), square), wrap=WAYS[way])


@ways
@on_ranks(2)
def test_another_default_device(way):
    """What the engine makes for itself is where it belongs."""
    batches = [batch(3, 6, step=step) for step in range(4)]

    def program(wrap, around):
        model = Model(Outer)
        with around:
            model = wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for x in batches:
                square(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.load_state_dict(model.state_dict())
        return parameters(model)

    expected = seeded(lambda wrap: program(wrap, nullcontext()), ddp)
    found = seeded(lambda wrap: program(wrap, torch.device("meta")), WAYS[way])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ------------------------------------------------------------------------ graphs from before a step


def step_between(model, joined):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model(batch(3, 6)).sum()
    square(model, batch(3, 6, step=1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    joined(model, old)


def old_and_new_in_one_loss(model, old):
    (old + square(model, batch(3, 6, step=2))).backward()


def old_and_new_in_the_other_order(model, old):
    (square(model, batch(3, 6, step=2)) + old).backward()


def old_alone(model, old):
    old.backward()


def old_and_new_in_one_call(model, old):
    torch.autograd.backward([square(model, batch(3, 6, step=2)), old])


def new_alone_and_then_old(model, old):
    square(model, batch(3, 6, step=2)).backward()
    old.backward()


@ways
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("around", [None, "checkpoint"])
@pytest.mark.parametrize(
    "joined",
    [
        old_and_new_in_one_loss,
        old_and_new_in_the_other_order,
        old_and_new_in_one_call,
        new_alone_and_then_old,
        old_alone,
    ],
)
@on_ranks(2)
def test_a_graph_from_before_a_step_is_refused(way, strategy, around, joined):
    if strategy == "no_shard":
        if way == "fully_shard":
            return
        wrap = fsdp(use_orig_params=way == "rows", sharding_strategy=ShardingStrategy.NO_SHARD)
    else:
        wrap = WAYS[way]
    recompute = None if around is None else partial(checkpoint, use_reentrant=False)
    model = wrap(Model(Two, recompute))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(RuntimeError, match="between"):
        step_between(model, joined)
    train(model, square, optimizer=optimizer)  # and goes on


@ways
@on_ranks(2)
def test_so_is_one_that_does_not_come_from_an_output(way):
    aside = []

    class Aside(Two):
        def forward(self, x):
            aside.append(self.two(torch.tanh(self.one(x))).sum())
            return super().forward(x)

    def with_what_was_aside(model, old):
        first = aside[0]
        (first + square(model, batch(3, 6, step=2))).backward()

    with pytest.raises(RuntimeError, match="between them its"):
        step_between(WAYS[way](Model(Aside)), with_what_was_aside)


@ways
@on_ranks(2)
def test_two_graphs_without_a_step_between_are_one_backward(way):
    def two(model, x):
        first, second = square(model, x), square(model, -x)
        return first + second

    same(lambda wrap: train(wrap(Model(Outer)), two), Averaged, WAYS[way])


@on_ranks(2)
def test_graphs_of_two_precisions_in_one_backward_are_as_in_two():
    def gradients(joined):
        torch.manual_seed(0)
        low = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
        model = fsdp(mixed_precision=low)(Model())
        losses = [square(model, batch(3, 6)), square(model.eval(), batch(3, 6))]
        for loss in [sum(losses)] if joined else losses[::-1]:
            loss.backward()
        return [param.grad for param in model.parameters()]

    assert all(map(torch.equal, gradients(joined=True), gradients(joined=False)))

"""Promises about what a step leaves behind: no activation outlives the graph that needs it.

Results do not show a leak, so activations are counted. A tensor that C++ keeps alive in a cycle is
in no list of the garbage collector's; a weak reference to its storage tells of it all the same.
"""

import gc
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from tests.promises import WAYS, Block, batch, seeded
from tests.ranks import on_ranks

STEPS = 50
ways = pytest.mark.parametrize("way", WAYS)


class Watched(Block):
    """A block of operations that save their own outputs, of which it counts those that live."""

    def __init__(self):
        super().__init__()
        self.layer, self.made = nn.Linear(6, 6), []

    def forward(self, x):
        found = torch.tanh(self.layer(x)).relu().exp()
        self.made.append(StorageWeakRef(found.untyped_storage()))
        return found.softmax(-1)


class TwoHeads(nn.Module):
    """A head that is in the loss, and a pooler that may not be."""

    def __init__(self, recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(Watched() for _ in range(2))
        self.head, self.pooler, self.recompute = nn.Linear(6, 6), Watched(), recompute

    def forward(self, x, fail=False):
        for block in self.blocks:
            reentrant = self.recompute
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        if fail:
            raise ValueError("a bad batch")
        return torch.sigmoid(self.head(x)).exp(), self.pooler(x)


def loss_of(model, x):
    return sum(output.sum() for output in model(x))


def whole(model, x):
    loss_of(model, x).backward()


def one_output_is_not_in_the_loss(model, x):
    model(x)[0].sum().backward()


def no_output_is_in_a_loss(model, x):
    model(x)


def a_loss_is_dropped(model, x):
    loss_of(model, x)


def an_exception_of_the_loss_is_caught(model, x):
    with suppress(ZeroDivisionError):
        (loss_of(model, x) * (1 // 0)).backward()


def an_exception_of_the_forward_is_caught(model, x):
    with suppress(ValueError):
        model(x, fail=True)


def an_exception_of_the_backward_is_caught(model, x):
    def fail(grad):
        raise ValueError

    outputs = model(x)
    outputs[0].register_hook(fail)
    with suppress(ValueError):
        sum(output.sum() for output in outputs).backward()


def validation_with_gradients(model, x):
    model.eval()
    loss_of(model, x).item()
    model.train()
    loss_of(model, x).backward()


def a_graph_is_retained(model, x):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)


def a_graph_is_used_twice(model, x):
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_of_inputs(model, x):
    x = x.requires_grad_()
    torch.autograd.grad(loss_of(model, x), x)


def two_forwards_and_one_backward(model, x):
    (loss_of(model, x) + loss_of(model, -x)).backward()


def activations_are_offloaded(model, x):
    with save_on_cpu(pin_memory=False):
        loss = loss_of(model, x)
    loss.backward()


def gradients_are_accumulated(model, x):
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        model(x)[1].sum().backward()
    loss_of(model, x).backward()


def in_inference_mode(model, x):
    with torch.inference_mode():
        model(x)


KINDS = [
    whole,
    one_output_is_not_in_the_loss,
    no_output_is_in_a_loss,
    a_loss_is_dropped,
    an_exception_of_the_loss_is_caught,
    an_exception_of_the_forward_is_caught,
    an_exception_of_the_backward_is_caught,
    validation_with_gradients,
    a_graph_is_retained,
    a_graph_is_used_twice,
    gradients_of_inputs,
    two_forwards_and_one_backward,
    activations_are_offloaded,
    gradients_are_accumulated,
    in_inference_mode,
]


def count_after(kind, way, freeze=False, recompute=None):
    def program(wrap):
        model = TwoHeads(recompute)
        model.pooler.requires_grad_(not freeze)
        watched = [module for module in model.modules() if isinstance(module, Watched)]
        model = wrap(model)
        for step in range(STEPS):
            kind(model, batch(3, 6, step=step))
            model.zero_grad()
        gc.collect()
        made = [storage for module in watched for storage in module.made]
        assert len(made) >= 2 * STEPS
        return sum(not storage.expired() for storage in made)

    return seeded(program, WAYS[way])


@pytest.mark.few(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_no_activation_is_left(kind, way):
    assert count_after(kind, way) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", [whole, one_output_is_not_in_the_loss, an_exception_of_the_forward_is_caught]
)
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_no_activation_is_left_of_what_is_recomputed(kind, way, reentrant):
    assert count_after(kind, way, recompute=reentrant) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [whole, one_output_is_not_in_the_loss, a_loss_is_dropped])
@on_ranks(2)
def test_no_activation_is_left_by_a_frozen_unit(kind, way):
    assert count_after(kind, way, freeze=True) == 0


class Frozen(Block):
    """Counts its inputs."""

    def __init__(self):
        super().__init__()
        self.layer, self.given = nn.Linear(6, 6).requires_grad_(False), []

    def forward(self, x):
        self.given.append(StorageWeakRef(x.untyped_storage()))
        return self.layer(x)


class AroundFrozen(nn.Module):
    """No operation computes what the frozen unit gets: it is the model's input, or that of a
    reentrant checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.frozen, self.reentrant = nn.Linear(6, 6), Frozen(), reentrant

    def forward(self, x):
        if self.reentrant:
            return checkpoint(self.frozen, self.layer(x), use_reentrant=True)
        return self.layer(self.frozen(x))


@pytest.mark.parametrize("reentrant", [False, True])
@ways
@on_ranks(2)
def test_no_input_of_a_frozen_unit_is_left(way, reentrant):
    def program(wrap):
        model = AroundFrozen(reentrant)
        frozen, model = model.frozen, wrap(model)
        for step in range(STEPS):
            model(batch(3, 6, step=step).requires_grad_()).sum().backward()
            model.zero_grad()
        gc.collect()
        assert len(frozen.given) >= STEPS
        return sum(not storage.expired() for storage in frozen.given)

    assert seeded(program, WAYS[way]) == 0


@on_ranks(2)
def test_a_leak_would_be_seen():
    kept = []
    assert count_after(lambda model, x: kept.append(loss_of(model, x)), "rows") == 3 * STEPS


@ways
@on_ranks(2)
def test_a_graph_that_is_collected_late_on_one_rank_parts_no_ranks(way):
    """A dropped graph lives until Python's collector comes, if something in it refers to itself.
    What is freed early must not depend on that: a checkpoint in the root gathers it again."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(6, 6), Watched(), nn.Linear(6, 6)

        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.last(self.block(x))

    def program(wrap):
        model, kept = wrap(Root()), []
        for step in range(4):
            x = batch(3, 6, step=step)
            kept.append(model(x).sum())
            dropped = model(x)
            if dist.get_rank() == 0:
                kept.append(dropped)  # as a collector that has not come yet
            del dropped
            kept[0].backward()
            kept.clear()
            model.zero_grad()

    seeded(program, WAYS[way])

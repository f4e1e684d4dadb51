"""params_in_graphs.py: sharded parameters in a graph of autograd, where unsharded ones belong."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity import check_at_rest
from tests.promises import WAYS, Averaged, Block, batch, same, train
from tests.ranks import on_ranks

SHARDED = pytest.mark.parametrize("way", WAYS)


class Checkpoint(torch.autograd.Function):
    """As in guided diffusion: it is given a block and its parameters, runs the block again in its
    backward, and asks for gradients of what it was given."""

    @staticmethod
    def forward(ctx, block, x, *params):
        ctx.block, ctx.given = block, (x, *params)
        return block(x)

    @classmethod
    def again(cls, ctx):
        x, *params = ctx.given
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return ctx.block(x), x, params

    @classmethod
    def backward(cls, ctx, grad):
        output, x, params = cls.again(ctx)
        return None, *torch.autograd.grad(output, (x, *params), grad, allow_unused=True)


class Adjoint(Checkpoint):
    """As that of a neural ODE: zeros for what has no gradient."""

    @classmethod
    def backward(cls, ctx, grad):
        grads = super().backward(ctx, grad)[1:]
        given = zip(ctx.given, grads, strict=True)
        return None, *(torch.zeros_like(p) if g is None else g for p, g in given)


class Reversible(Checkpoint):
    """Is given parameters, too, and has the gradients of the block added up where they belong."""

    @classmethod
    def backward(cls, ctx, grad):
        output, x, params = cls.again(ctx)
        torch.autograd.backward(output, grad)
        return None, x.grad, *(None for _ in params)


class Around(nn.Module):
    """Calls its second part by a Function of this kind."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 6)
        self.block = Block()
        self.block.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.block.forward = self.block.layers.forward

    def forward(self, x):
        return self.kind.apply(self.block, self.first(x), *self.block.parameters())


def loss_of(model, x):
    return model(x).pow(2).sum()


@SHARDED
@pytest.mark.parametrize("kind", [Checkpoint, Adjoint])
@on_ranks(2)
def test_a_function_that_asks_for_gradients_of_what_is_sharded_is_refused(kind, way):
    model = WAYS[way](Around(kind))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of unit 'block' would get no gradient"):
            loss_of(model, batch(3, 6)).backward()
        assert all(param.grad is None or not param.grad.any() for param in model.parameters())
    # All is as if it had not been tried.
    inner = model.module if hasattr(model, "module") else model
    inner.kind = Reversible
    loss_of(model, batch(3, 6)).backward()
    check_at_rest(SimpleNamespace(engine=model._hooks.engine))
    assert all(param.grad is not None for param in model.parameters())


@SHARDED
@pytest.mark.parametrize("kind", [Checkpoint, Adjoint])
@on_ranks(2)
def test_so_is_one_around_the_model_whose_backward_is_over_by_then(kind, way):
    model = WAYS[way](nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x = batch(3, 6).requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of unit <root> would get no gradient"):
            kind.apply(model, x, *model.parameters()).sum().backward()


@SHARDED
@on_ranks(2)
def test_what_was_frozen_in_the_first_step_is_watched_when_it_is_thawed(way):
    model = WAYS[way](Around(Checkpoint)).requires_grad_(False)
    model(batch(3, 6))
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="of unit 'block' would get no gradient"):
        loss_of(model, batch(3, 6)).backward()


@SHARDED
@on_ranks(2)
def test_a_function_that_runs_a_backward_of_the_block_is_right(way):
    def program(wrap):
        return train(wrap(Around(Reversible)), loss_of)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a loss was computed with the flat parameter")
        same(program, Averaged, WAYS[way])


class Dropped(Block):
    """Uses none of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x * 2


def penalized(model, x):
    """Plus a penalty that is computed first, so that a backward comes to the parameters last."""
    penalty = sum(param.pow(2).sum() for param in model.parameters())
    penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
    return loss_of(model, x) + 0.01 * penalty


@SHARDED
@pytest.mark.filterwarnings("ignore:a loss was computed with the flat parameter")
@on_ranks(2)
def test_a_penalty_for_a_unit_without_a_gradient_of_its_own_is_no_mistake(way):
    model = WAYS[way](nn.Sequential(nn.Linear(6, 6), Dropped()))
    penalized(model, batch(3, 6)).backward()
    check_at_rest(SimpleNamespace(engine=model._hooks.engine))


@SHARDED
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.filterwarnings("ignore:a loss was computed with the flat parameter")
@on_ranks(2)
def test_between_steps_parameters_can_be_frozen_and_cast(backward, way):
    """torch swaps DTensors, and refuses that if somebody keeps the node of one that is frozen."""
    model = WAYS[way](nn.Sequential(nn.Linear(6, 6), Dropped()))
    loss = penalized(model, batch(3, 6))
    if backward:
        loss.backward()
    del loss
    model.zero_grad()
    model.requires_grad_(False)
    model.double()
    model.requires_grad_(True)
    penalized(model, batch(3, 6).double()).backward()
    check_at_rest(SimpleNamespace(engine=model._hooks.engine))

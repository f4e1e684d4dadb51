"""Trained by the core and by DDP, with other data on each rank: equal in every bit.

Two ranks, because the sum of two numbers is the same in both orders. Here each model meets each
strategy, and schedules take turns; `make matrix ARGS=core` crosses all of them.
"""

import copy
import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from minifsdp.core import (
    BackwardPrefetch,
    ForwardPrefetch,
    ShardingStrategy,
    SynchronizeAfterFree,
)
from minifsdp.core.unit_state import ShardedState

from .common import Block, batch, full_gradients, full_parameters, mlp, on_ranks, sharded

SCHEDULES = list(
    itertools.product(
        (None, *BackwardPrefetch),
        (False, *ForwardPrefetch),
        (True, 1, False, SynchronizeAfterFree()),
    )
)


class Nested(Block):
    """A unit with a unit in it."""


def nested() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), Nested(Block(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 5)), nn.Linear(5, 1)
    )


class Tied(nn.Module):
    """A small GPT, with one table for words that come in and words that go out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1) for _ in range(2))
        self.blocks = nn.Sequential(*(Block(layer) for layer in layers))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.table((7 * x).long())))


class ThreeTimes(nn.Module):
    """One unit three times in a forward, another one in between."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.once = Block(nn.Linear(3, 3), nn.Tanh()), Block(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.once(self.again(x))))


class Unused(nn.Module):
    """A unit that is never called, one that the loss does not need, one that is needed in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside = Block(nn.Linear(3, 5)), Block(nn.Linear(5, 5))
        self.never = Block(nn.Linear(5, 5))
        self.partly = Block(nn.Linear(5, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.aside(x)
        return self.partly(x)[:, :2]


def frozen() -> nn.Module:
    """Frozen first, where the inputs have no gradient, and in the middle."""
    later = mlp(4)[1:]
    model = nn.Sequential(Block(nn.Linear(3, 5)), *later)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


class Odd(nn.Module):
    """A unit smaller than the ranks, one without parameters, 0-d parameters and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.tiny, self.hollow = Block(nn.Linear(3, 1, bias=False)), Block(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.hollow(self.tiny(x)) * self.scale + self.nothing.sum()


def conv() -> nn.Module:
    layers = nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 3)), Block(*layers), nn.Flatten(), nn.Linear(9, 2))


class Recurrent(nn.Module):
    """An RNN keeps a list of its weights, and looks in its forward whether they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = Block(nn.LSTM(3, 4, batch_first=True)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x[None])[0])


class Checkpointed(nn.Module):
    """Checkpoints around units, and inside of one."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.reentrant = nn.Linear(3, 5), mlp()[1:4], reentrant
        self.inside = Block(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inside(x)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=False)
        return self.last(hidden)


class AllInside(nn.Module):
    """All of it is in a checkpoint, whose backward is a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)


class EarlyInput(nn.Module):
    """Its input has its gradient before the last of its layers has run its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(torch.ones_like(x))) + self.last(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "nested": nested,
    "tied": Tied,
    "three times": ThreeTimes,
    "unused": Unused,
    "odd": Odd,
    "conv": conv,
    "recurrent": Recurrent,
    "checkpoints": lambda: Checkpointed(False),
    "reentrant checkpoints": lambda: Checkpointed(True),
    "a checkpoint inside": lambda: nn.Sequential(Block(Inside()), Block(nn.Linear(2, 2))),
    "a reentrant one inside": lambda: nn.Sequential(nn.Linear(3, 3), Block(AllInside())),
}


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())  # of dropout
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


@functools.cache  # for all strategies and schedules
def by_ddp(name: str) -> tuple[list[Tensor], nn.Module]:
    """The losses, and the model that was trained."""
    plain = built(name)
    return train(DDP(plain, find_unused_parameters=name == "unused")), plain


def compare(name: str, **settings) -> None:
    expected, plain = by_ddp(name)
    model = sharded(built(name), **settings)
    found = train(model)
    assert all(map(torch.equal, found, expected)), (name, settings)
    parameters = full_parameters(model)
    for key, param in plain.named_parameters(remove_duplicate=True):
        assert torch.equal(parameters[key], param), (name, key, settings)
    for unit in model.engine.units:  # and nothing is left of the step
        assert unit.reasons == set(), (name, unit.label, unit.reasons)
        assert unit.state.sharded is ShardedState.SHARDED, (name, unit.label)
        if unit.unsharded.needs_unshard:
            assert unit.unsharded.storage.size() == 0, (name, unit.label)


def of_strategy(strategy):
    turns = itertools.cycle(SCHEDULES)
    for name in MODELS:
        for _ in range(3):
            backward, forward, limit = next(turns)
            compare(
                name,
                sharding_strategy=strategy,
                backward_prefetch=backward,
                forward_prefetch=forward,
                limit_all_gathers=limit,
            )


@on_ranks(2)
def test_full_shard():
    of_strategy(ShardingStrategy.FULL_SHARD)


@on_ranks(2)
def test_shard_grad_op():
    of_strategy(ShardingStrategy.SHARD_GRAD_OP)


@on_ranks(2)
def test_no_shard():
    of_strategy(ShardingStrategy.NO_SHARD)


@on_ranks(2)
def test_every_schedule():
    for backward, forward, limit in SCHEDULES:
        compare(
            "nested", backward_prefetch=backward, forward_prefetch=forward, limit_all_gathers=limit
        )


@on_ranks(2)
def test_units_may_be_frozen():
    plain = frozen()
    expected = train(DDP(plain))
    model = sharded(frozen())
    assert all(map(torch.equal, train(model), expected))


@on_ranks(2)
def test_units_may_be_wrapped_by_hand_from_the_inside_outwards():
    plain = mlp()
    expected = train(DDP(plain))
    model = mlp()
    for at in (1, 2, 3):
        model[at] = sharded(model[at], auto_wrap_policy=None)
        model[at](torch.ones(1, 5))  # it is a root until there is one around it
    model = sharded(model, auto_wrap_policy=None)
    assert [unit.name for unit in model.engine.units] == ["", "1", "2", "3"]
    assert all(map(torch.equal, train(model), expected))


@on_ranks(2)
def test_several_backwards_add_up():
    plain, model = mlp(), sharded(mlp())
    for one in (plain, model):
        for at in range(3):
            one(batch(at)).square().mean().backward()
    for name, grad in full_gradients(model).items():
        expected = plain.get_parameter(name).grad  # of this rank alone
        dist.all_reduce(expected.div_(2))
        torch.testing.assert_close(grad, expected)  # added up in another order


@on_ranks(2)
def test_an_input_may_have_its_gradient_before_the_unit_is_done():
    """A leaf has it at once. (A trained unit is freed by its own gradient, not by its inputs'.)"""

    def gradients(model: nn.Module) -> Tensor:
        x = batch().requires_grad_()
        model(x).square().mean().backward()
        return x.grad

    torch.manual_seed(0)
    plain = nn.Sequential(Block(EarlyInput()), nn.Linear(3, 3))
    model = sharded(copy.deepcopy(plain))
    assert torch.equal(gradients(model), gradients(plain))
    for name, grad in full_gradients(model).items():
        expected = plain.get_parameter(name).grad.div_(2)
        dist.all_reduce(expected)
        assert torch.equal(grad, expected), name


@on_ranks(2)
def test_an_evaluation_comes_between():
    plain, model = DDP(mlp()), sharded(mlp())
    for one in (plain, model):
        loss = one(batch()).square().mean()
        with torch.no_grad():
            evaluated = one(batch(1))
        loss.backward()
        if one is plain:
            expected = evaluated
    assert torch.equal(expected, evaluated)


@on_ranks(3)
def test_three_ranks_are_as_close_as_their_sums_are():
    """Three numbers may be added up in other orders: each of two additions is off by half of 2**-23
    of the sum, in each of four steps."""
    plain, model = mlp(), sharded(mlp())
    train(DDP(plain))
    train(model)
    found = full_parameters(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param, rtol=0, atol=2e-6)


@on_ranks(1)
def test_a_single_rank_is_a_plain_model():
    plain = mlp()
    assert all(map(torch.equal, train(sharded(mlp())), train(plain)))

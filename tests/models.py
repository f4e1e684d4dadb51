"""The models of the tests: small, and each with something in it that sharding may get wrong.

A :class:`Case` says how to build a model, which modules become units, and what goes in. The same
seed gives the same parameters on every rank; inputs differ from rank to rank and step to step,
otherwise a missing reduction could not be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One model and how to use it."""

    build: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    inputs: Callable[[], Inputs]  # random; the caller has set the seed
    loss: Callable[..., Tensor] = field(default=lambda output, *inputs: output.pow(2).mean())
    experts: tuple[type[nn.Module], ...] = ()  # each rank has its own, in a group of one
    unused: bool = False  # some parameters get no gradient


class Unit(nn.Sequential):
    """Becomes a unit of its own wherever a case says so."""


class Inner(nn.Sequential):
    """A second such class, for units in units."""


class SharedTransformer(nn.Module):
    """Encoder and decoder, one embedding for input and output, buffers of two kinds, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(23, width)
        self.transformer = nn.Transformer(width, 2, 2, 2, 8, dropout=0.1, batch_first=False)
        self.output = nn.Linear(width, 23)
        self.output.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("vocab_bias", torch.randn(width))
        self.register_buffer("long_buffer", torch.arange(width))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source, target = self.embed(source), self.embed(target) + self.vocab_bias
        target = target + self.long_buffer.type_as(target) / 16
        return self.output(self.norm(self.transformer(source, target)))


def tokens() -> Inputs:
    return torch.randint(23, (6, 2)), torch.randint(23, (4, 2))


def cross_entropy(output: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def nested_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 4),
        Unit(Inner(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 16)),
        Unit(nn.Linear(16, 4), nn.Tanh()),
        nn.Linear(4, 8),
    )


def rows() -> Inputs:
    return (torch.rand(4, 8),)


class Twice(nn.Module):
    """One unit three times in a forward, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Unit(nn.Linear(8, 8)), Unit(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.again(self.first(self.again(x))))


class Unused(nn.Module):
    """One unit that is never called, and one whose output does not reach the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored = Unit(nn.Linear(8, 8)), Unit(nn.Linear(8, 8))
        self.never = Unit(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.used(x))
        self.ignored(x)
        return self.last(x)


class Partial(nn.Module):
    """Uses one parameter of a unit, and not the other."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Unit(nn.Linear(8, 8), nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.unit(x)[:, :3]
        return self.last(x @ x.new_ones(3, 8))


def frozen() -> nn.Module:
    """Frozen first (its inputs have no gradient), in the middle, and not at all."""
    model = nn.Sequential(
        Unit(nn.Linear(8, 9), nn.Tanh()),
        Unit(nn.Linear(9, 7), nn.Tanh()),
        Unit(nn.Linear(7, 7), nn.Tanh()),
        nn.Linear(7, 8),
    )
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a unit smaller than the world, 0-d and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wide = Unit(nn.Linear(8, 7), nn.Linear(7, 5, bias=False))
        self.tiny = Unit(nn.Linear(5, 1, bias=False))
        self.tail = Unit(nn.Linear(1, 1, bias=False))
        self.hollow = Unit(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.hollow(self.tail(self.tiny(self.wide(x)))) * self.scale + self.nothing.sum()


def conv_net() -> nn.Module:
    return nn.Sequential(
        Unit(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()),
        Unit(nn.Conv2d(3, 5, 3, stride=2), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(5 * 9, 4),
    )


class Recurrent(nn.Module):
    """An RNN keeps a list of its weights beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x[None])[0])


class Expert(nn.Linear):
    """A layer that is another one on each rank, and whose gradient nobody else shares."""

    def __init__(self, *sizes: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(42 + dist.get_rank())
            super().__init__(*sizes)


def mixture_of_experts() -> nn.Module:
    return nn.Sequential(
        Unit(nn.Linear(8, 16), nn.Tanh()), Expert(16, 12), nn.Tanh(), Unit(nn.Linear(12, 8))
    )


TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
CASES = {
    "transformer": Case(SharedTransformer, TRANSFORMER_LAYERS, tokens, cross_entropy),
    "mlp_some": Case(nested_mlp, (Unit,), rows),
    "mlp_nested": Case(nested_mlp, (Unit, Inner), rows),
    "mlp_always": Case(nested_mlp, (nn.Module,), rows),
    "mlp_root_only": Case(nested_mlp, (), rows),
    "twice": Case(Twice, (Unit,), rows),
    "unused": Case(Unused, (Unit,), rows, unused=True),
    "partial": Case(Partial, (Unit,), rows),
    "frozen": Case(frozen, (Unit,), rows),
    "odd": Case(Odd, (Unit,), rows),
    "conv": Case(conv_net, (Unit,), lambda: (torch.rand(2, 1, 8, 8),)),
    "recurrent": Case(Recurrent, (nn.LSTM,), rows),
    "experts": Case(mixture_of_experts, (Unit,), rows, experts=(Expert,)),
}

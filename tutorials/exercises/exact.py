"""A small model of whole numbers, for checks on ranks.

With up to two ranks all sums of its training are exact, in whatever order they are made. So another
solution that is right gives the same bits.

Imported by checks in their bodies only, because it imports minifsdp.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy

WIDTH = 3


class Layer(nn.Linear):
    """A unit of its own."""


class Model(nn.Module):
    """Two units, and parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(whole(param.shape, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.beside(x)


def whole(shape: Any, largest: int) -> Tensor:
    """Random whole numbers from ``-largest`` to ``largest``."""
    return torch.randint(-largest, largest + 1, tuple(shape)).float()


def wrapped(**settings: Any) -> FullyShardedDataParallel:
    """The same model on all ranks, each layer a unit."""
    settings = {"auto_wrap_policy": ModuleWrapPolicy({Layer}), **settings}
    return FullyShardedDataParallel(Model(), **settings)


def batch() -> Tensor:
    """The next one: on each rank other rows. All ranks have to ask for it equally often."""
    rows = whole((dist.get_world_size(), 2, WIDTH), 3)
    return rows[dist.get_rank()]


def train(model: FullyShardedDataParallel, pattern: str = "s", steps: int = 2) -> list[float]:
    """Train with SGD, and return the loss of each backward.

    Args:
        pattern: the backwards of one step, one letter for each: ``w`` is in ``no_sync()``, ``s``
            is not.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.25), []
    for _ in range(steps):
        for letter in pattern:
            with model.no_sync() if letter == "w" else nullcontext():
                loss = model(batch()).sum()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

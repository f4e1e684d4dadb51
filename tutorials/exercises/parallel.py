"""Training steps on two gloo ranks, for checks: real values, bit for bit as DDP's.

Imported by checks in their bodies only, because it imports minifsdp.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy
from tutorials.exercises import observe


class Block(nn.Module):
    """A layer with a bias and a norm; an odd number of elements, so that there is padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input, and a function of it."""
        result: Tensor = x + self.scale * torch.tanh(self.linear(self.norm(x)))
        return result


def small_model() -> nn.Module:
    """Three blocks between two linear layers, the same on every rank."""
    torch.manual_seed(torch.initial_seed())
    return nn.Sequential(nn.Linear(4, 6), Block(6), Block(6), Block(6), nn.Linear(6, 2))


def train(
    steps: int = 3,
    backward: Callable[[nn.Module, int], float] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """Train a small model, and observe each loss and, at the end, each parameter. In the run that
    says what is expected, DistributedDataParallel trains it.

    Args:
        backward: runs a step's forward and backward, and returns the loss.
        optimizer: makes one of the parameters; Adam by default.
        settings: arguments of the wrapper.
    """
    model = small_model()
    if observe.reference:
        model = DistributedDataParallel(model)
    else:
        settings = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **settings}
        model = FullyShardedDataParallel(model, **settings)
    adam = partial(torch.optim.Adam, lr=0.01)
    stepped = (optimizer or adam)(model.parameters())
    for step in range(steps):
        yield f"loss of step {step + 1}", (backward or one_backward)(model, step)
        stepped.step()
        stepped.zero_grad()
    for name, value in model.state_dict().items():
        yield f"parameter {name.removeprefix('module.')} after {steps} steps", value


def one_backward(model: nn.Module, step: int) -> float:
    """Forward and backward of a batch, which is another one on each rank and in each step."""
    loss = model(batch(step)).pow(2).mean()
    loss.backward()
    return float(loss)


def batch(number: int) -> Tensor:
    """A batch of this rank."""
    seed = torch.initial_seed() + 1000 * number + dist.get_rank()
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))

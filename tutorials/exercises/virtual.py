"""Training steps on the virtual GPU, for checks: no values, no ranks, exact times and bytes.

Imported by checks in their bodies only, because it imports minifsdp.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minifsdp import FullyShardedDataParallel, ModuleWrapPolicy
from minifsdp.sim import VirtualGpu, cluster


class Block(nn.Module):
    """A layer: a linear map, and its input added to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def train(
    widths: list[int] | None = None,
    steps: int = 3,
    rows: int = 4096,
    each_step: Callable[[VirtualGpu], None] = lambda gpu: None,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    hardware: dict[str, Any] | None = None,
    **settings: Any,
) -> VirtualGpu:
    """Train a stack of blocks, each a unit, and return the virtual GPU that it ran on.

    Args:
        widths: of the blocks' layers; eight of 1024 by default.
        each_step: called after each step, with reports of that step.
        loss: of the model and an input; the mean of the output by default.
        hardware: arguments of :func:`minifsdp.sim.cluster`.
        settings: arguments of the wrapper.
    """
    widths = [1024] * 8 if widths is None else widths
    with cluster(**{"gpu": "a100-40", "nodes": 2, "gpus_per_node": 8, **(hardware or {})}) as gpu:
        layers: list[nn.Module] = []
        for before, width in zip([widths[0], *widths], widths, strict=False):
            layers += [nn.Linear(before, width, bias=False)] * (before != width) + [Block(width)]
        settings = {"auto_wrap_policy": ModuleWrapPolicy({Block}), **settings}
        model = FullyShardedDataParallel(nn.Sequential(*layers), **settings)
        gpu.allocator.empty_cache()  # what shards were cut out of is no memory of a step
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            x = torch.empty(rows, widths[0])
            (model(x).mean() if loss is None else loss(model, x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
            each_step(gpu)
    return gpu

"""What page 15 runs again: blocks in a checkpoint, and a layer of the root between blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from launch import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy

HOW: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "no layer": lambda layer, x: x,
    "a plain layer": lambda layer, x: layer(x),
    "in a checkpoint": partial(checkpoint, use_reentrant=False),
}
"""How the root's layer between the blocks is run."""

# Of each step: whether the root has memory when the backward of blocks 3, 2 and 1 begins, and the
# gathers of all four units. The page's text says so.
EXPECTED = {
    "no layer": [([False, False, False], 7), ([False, False, False], 7)],
    "a plain layer": [([True, True, False], 7), ([True, True, False], 7)],
    "in a checkpoint": [([False, True, True], 8), ([True, True, True], 7)],
}


class Around(nn.Module):
    """A checkpoint around the call of a block, hooks and all."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


class Between(nn.Module):
    """Three blocks between an embedding and a head, and a layer of the root's after each block."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)
        self.blocks, self.run = nn.ModuleList(nn.GRUCell(6, 6) for _ in range(3)), run

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for each token."""
        x = self.first(tokens)
        for block in self.blocks:
            x = self.run(self.between, block(x))
        scores: Tensor = self.head(x)
        return scores


@on_ranks(2)
def two_steps(how: str) -> None:
    """Print when the root has memory in the backward, and how many gathers there are."""
    model: Any = Between(HOW[how])
    there: list[bool] = []
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: there.append(has_memory(engine.root)))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.GRUCell}))
    engine = model.engine
    for step in (1, 2):
        there.clear()
        before = engine.stats.all_gathers
        model(torch.arange(8)).sum().backward()
        gathers = engine.stats.all_gathers - before
        if dist.get_rank() == 0:
            print(f"{how:15} step {step}: {gathers} gathers; root there at blocks 3, 2, 1: {there}")
        assert (there, gathers) == EXPECTED[how][step - 1]


def has_memory(unit: Any) -> bool:
    """Whether the unit is gathered."""
    return bool(unit.unsharded.storage.size())

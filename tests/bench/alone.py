"""What the parts of a step take alone: the measured reason why a bound cannot be met on a machine.

A contender computes as a rank without others does, and then sends and receives the messages of a
sharded step, one after another, out of and into memory that is never freed. It trains nothing
together with the other ranks. Only what hides behind the computation can be faster; where the ranks
are on as many cores and the link is the machine's own memory, sending is computing too, and hides
nothing.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.comm.collectives import all_gather, direct, reduce_scatter
from minifsdp.comm.neighbors import find_neighbors
from tutorials.train_gpt import Block


class MessagesAlone(nn.Module):
    """``model`` on a rank alone, and messages: each block is a unit, what is left the root's.

    Args:
        gathers: of each block in a step: 2 of FULL_SHARD, 1 of SHARD_GRAD_OP. The root is gathered
            once.
    """

    def __init__(self, model: nn.Module, device: torch.device, gathers: int) -> None:
        super().__init__()
        self.model, self.ranks = model.to(device), dist.get_world_size()
        if direct(device):
            find_neighbors(dist.group.WORLD)
        blocks = [_numel(module) for module in model.modules() if isinstance(module, Block)]
        root = _numel(model) - sum(blocks)
        self.gathered = [self._memory(numel, device) for numel in [root, *blocks * gathers]]
        # What a rank keeps is somewhere else in memory: it is copied to its place as well.
        self.shards = [full.chunk(self.ranks)[0].clone() for full in self.gathered]
        self.reduced = [self._memory(numel, device) for numel in [*blocks, root]]

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(tokens)
        group = dist.group.WORLD
        for tag, (full, shard) in enumerate(zip(self.gathered, self.shards, strict=True)):
            all_gather(full, shard, group, tag)()
        for tag, flat in enumerate(self.reduced):
            _, finish = reduce_scatter(flat, group, 1 / self.ranks, tag)
            finish()
        return output

    def _memory(self, numel: int, device: torch.device) -> Tensor:
        return torch.zeros(-(-numel // self.ranks) * self.ranks, device=device)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())

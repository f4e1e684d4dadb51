"""What the parts of a step take alone: the measured reason why a bound cannot be met on a machine.

A contender computes as a rank without others does, and sends and receives the messages of a sharded
step, out of and into memory that is never freed. It trains nothing together with the other ranks.

- One after another, after computing: only what hides behind the computation can be faster. Where
  the ranks are on as many cores and the link is the machine's own memory, sending is computing too,
  and hides nothing.
- All of them meanwhile, as if none had to wait for anything: what the cores are busy with then. On
  a slow link, where the most is hidden, the system's network code still needs the cores.
"""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.comm.collectives import direct
from minifsdp.comm.neighbors import find_neighbors
from minifsdp.core.streams import Finish
from minifsdp.sim.calibration.collectives import chunks
from minifsdp.strategies import comm_of
from tutorials.train_gpt import Block


class MessagesAlone(nn.Module):
    """``model`` on a rank alone, and messages: each block is a unit, what is left the root's.

    Args:
        gathers: of each block in a step: 2 of FULL_SHARD, 1 of SHARD_GRAD_OP. The root is gathered
            once.
        meanwhile: all messages start before the computation, and are waited for after it.

    Attributes:
        computing: seconds of each step while messages travel, with what the rank does for them: it
            copies its own shards, and adds up what arrives.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, gathers: int, meanwhile: bool = False
    ) -> None:
        super().__init__()
        self.meanwhile = meanwhile
        self.computing: list[float] = []
        if meanwhile:
            first = next(model.parameters())  # the embedding's, whose gradient comes last
            first.register_post_accumulate_grad_hook(lambda _: self._finish_all())
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
        if self.meanwhile:
            before = time.thread_time()  # in which it does not wait
            self.under_way = list(self._messages())
            self._start = time.perf_counter() - (time.thread_time() - before)
            return self.model(tokens)  # type: ignore[no-any-return]
        output: Tensor = self.model(tokens)
        for finish in self._messages():
            finish()
        return output

    def _finish_all(self) -> None:
        computed, before = time.perf_counter() - self._start, time.thread_time()
        for finish in self.under_way:
            finish()
        self.computing.append(computed + time.thread_time() - before)

    def slowest(self) -> list[float]:
        """``computing`` of the rank that took longest, on which the others wait."""
        seconds = torch.tensor(self.computing)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.tolist()  # type: ignore[no-any-return]

    def _messages(self) -> Iterator[Finish]:
        """Start one after another, whenever the next is asked for."""
        group = dist.group.WORLD
        for tag, (full, shard) in enumerate(zip(self.gathered, self.shards, strict=True)):
            unit = chunks(full.numel(), group, tag)
            yield comm_of(unit, full.device).all_gather(unit, full, shard, group)
        for tag, flat in enumerate(self.reduced):
            unit = chunks(flat.numel(), group, tag)
            yield comm_of(unit, flat.device).reduce_scatter(unit, flat, 1 / self.ranks)[1]

    def _memory(self, numel: int, device: torch.device) -> Tensor:
        return torch.zeros(-(-numel // self.ranks) * self.ranks, device=device)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())

"""AdamW's step over many small parameters, as ratios to that of a plain model:
``python -m tests.bench.optimizers``.

40 blocks of six parameters each, on one rank that has all of them, so that what is compared is what
the host spends on each parameter. All take turns in each round, and a ratio is the median of all
rounds.
"""

import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard, local_params

ROUNDS, WARMUP = 40, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def model(kind: str) -> nn.Module:
    made = nn.Sequential(*(Block() for _ in range(40)))
    if kind == "chunks":
        return FSDP(made, auto_wrap_policy=ModuleWrapPolicy({Block}))
    if kind != "plain":
        for block in made:
            fully_shard(block)
        fully_shard(made)
    return made


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{file.name}")
        for foreach in (True, False):
            compare(foreach)
        dist.destroy_process_group()


def compare(foreach: bool) -> None:
    kinds = ("plain", "chunks", "rows", "rows, local_params")
    models = {kind: model(kind) for kind in kinds}
    steps = {k: torch.optim.AdamW(m.parameters(), foreach=foreach) for k, m in models.items()}
    local_params(steps["rows, local_params"])
    rounds = [
        {kind: seconds(models[kind], steps[kind]) for kind in kinds} for _ in range(ROUNDS + WARMUP)
    ][WARMUP:]
    for kind in kinds[1:]:
        ratio = statistics.median(its[kind] / its["plain"] for its in rounds)
        print(f"foreach={foreach!s:5}  {kind:18} to plain  {ratio:.2f}")


def seconds(made: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    made(torch.randn(4, 16)).square().mean().backward()
    begin = time.perf_counter()
    optimizer.step()
    taken = time.perf_counter() - begin
    optimizer.zero_grad()
    return taken


if __name__ == "__main__":
    main()

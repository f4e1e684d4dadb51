"""What comes before the first step: ``python -m tests.bench.start``.

Wrapping a model of 7 billion parameters in bfloat16, which is on the meta device, as the first of 2
and of 1,024 ranks that do not send anything (torch's "fake" backend). Each unit gets memory when it
is wrapped by FSDP1, or by minifsdp in chunks, and all at once after wrapping (``to_empty``) by
``fully_shard``. No values are written, so the time is that of the wrapper.

Each contender has a process of its own, and they take turns. The time is that of the CPU, all
threads; the memory is the most that the process had, beyond what it had before. And the time to
import minifsdp, beyond torch's own.
"""

import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, fully_shard
from tests.bench.meters import forget_resident_peak, resident_peak

ROUNDS, RANKS = 3, (2, 1024)
WIDTH, HIDDEN, WORDS, BLOCKS = 4096, 11_008, 32_000, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("it is wrapped, and never run")


def model() -> nn.Module:
    with torch.device("meta"):
        head = nn.Linear(WIDTH, WORDS, bias=False)
        made = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(BLOCKS)), nn.RMSNorm(WIDTH), head
        )
        return made.to(torch.bfloat16)


def get_memory(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def in_rows(shard: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    def wrap(made: nn.Module) -> object:
        for block in made.modules():
            if isinstance(block, Block):
                shard(block)
        shard(made)
        return made.to_empty(device="cpu")

    return wrap


def by_fsdp1(made: nn.Module) -> object:
    policy, cpu = TorchWrapPolicy({Block}), torch.device("cpu")
    return TorchFSDP(made, auto_wrap_policy=policy, param_init_fn=get_memory, device_id=cpu)


def by_chunks(made: nn.Module) -> object:
    return FSDP(made, auto_wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=get_memory)


CONTENDERS: dict[str, Callable[[nn.Module], object]] = {
    "FSDP1": by_fsdp1,
    "FSDP2": in_rows(torch_fully_shard),
    "minifsdp, chunks": by_chunks,
    "minifsdp, rows": in_rows(fully_shard),
}


def measured(contender: str, ranks: int) -> dict[str, float]:
    """In this process, which is new: seconds of the CPU, and bytes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    made = model()
    began, before = time.process_time(), forget_resident_peak()
    wrapped = CONTENDERS[contender](made)
    found = {"wrap": time.process_time() - began, "bytes": resident_peak() - before}
    del wrapped
    dist.destroy_process_group()
    return found


def main() -> None:
    for ranks in RANKS:
        rounds = [
            {
                name: _in_a_process("-m", "tests.bench.start", name, str(ranks))
                for name in CONTENDERS
            }
            for _ in range(ROUNDS)
        ]
        for name in CONTENDERS:
            seconds = statistics.median(its[name]["wrap"] for its in rounds)
            mebibytes = statistics.median(its[name]["bytes"] for its in rounds) / 2**20
            ratio = statistics.median(its[name]["wrap"] / its["FSDP1"]["wrap"] for its in rounds)
            print(
                f"{ranks:5,} ranks  {name:18}{seconds:7.2f} s  {ratio:5.2f} of FSDP1's"
                f"{mebibytes:9,.0f} MiB at the peak",
                flush=True,
            )
    imports = [_in_a_process("-c", IMPORT) for _ in range(ROUNDS)]
    for name in imports[0]:
        seconds = statistics.median(its[name] for its in imports)
        print(f"import {name:18}{seconds:7.2f} s")


IMPORT = """
import json, time
times = [time.process_time()]
import torch
times.append(time.process_time())
from torch.distributed.fsdp import FullyShardedDataParallel
times.append(time.process_time())
from minifsdp import FullyShardedDataParallel
times.append(time.process_time())
names = "torch", "torch's FSDP, beyond that", "minifsdp, beyond that"
print(json.dumps({name: b - a for name, a, b in zip(names, times, times[1:])}))
"""


def _in_a_process(*arguments: str) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
    else:
        main()

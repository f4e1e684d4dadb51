"""Saving and loading, minifsdp's two layouts against torch's `fully_shard`: a part of `make bench`.

A GPT of 34 M parameters and its AdamW (410 MB in all), 2 ranks, one thread each, with the same
library, torch.distributed.checkpoint, into the same folder. The contenders take turns, so only the
ratios mean anything. **resume** loads into an optimizer that has not stepped, as programs do that
go on after a stop; **load** loads into one that has. **memory** is by how much the resident set of
a rank's process grows at most meanwhile.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, state_to_load, state_to_save
from tests.bench.meters import forget_resident_peak, resident_peak
from tutorials.train_gpt import GPT, Block


def torchs(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def mini(model: GPT, in_rows: bool) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=in_rows)


WAYS = {"torch": torchs, "rows": lambda m: mini(m, True), "chunks": lambda m: mini(m, False)}


class Contender:
    """One model with its optimizer, after a step."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.model = WAYS[way](GPT(layers=8, width=512, vocab=8192))
        self.optimizer = self.new_optimizer()
        self.model(torch.randint(8192, (1, 32))).logsumexp(-1).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), foreach=True)

    def resume(self, folder: Path) -> None:
        self.optimizer = self.new_optimizer()
        self.load(folder)

    def save(self, folder: Path) -> None:
        dcp.save(state_to_save(self.model, self.optimizer), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        with state_to_load(self.model, self.optimizer) as state:
            dcp.load(state, checkpoint_id=folder)


class Torchs(Contender):
    """In the way that torch documents for its fully_shard."""

    def state(self) -> dict[str, Any]:
        names, both = ("model", "optimizer"), get_state_dict(self.model, self.optimizer)
        return dict(zip(names, both, strict=True))

    def save(self, folder: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        dcp.load(state := self.state(), checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


def bench(rank: int, rounds: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    contenders = {way: (Torchs if way == "torch" else Contender)(way) for way in WAYS}
    seconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[tuple[str, str], list[int]] = {}
    for _ in range(rounds):
        for what in ("save", "load", "resume"):
            for way, contender in contenders.items():
                dist.barrier()
                before, start = forget_resident_peak(), time.perf_counter()
                getattr(contender, what)(Path(folder, way))
                dist.barrier()
                seconds.setdefault((what, way), []).append(time.perf_counter() - start)
                memory.setdefault((what, way), []).append(resident_peak() - before)
    if rank == 0:
        for what in ("save", "load", "resume"):
            for way in ("rows", "chunks"):
                pairs = zip(seconds[what, way], seconds[what, "torch"], strict=True)
                ratio = statistics.median(mine / theirs for mine, theirs in pairs)
                most, theirs = max(memory[what, way]), max(memory[what, "torch"])
                print(
                    f"{what:6} {way:6} / torch's fully_shard  {ratio:.2f} of its time; at most "
                    f"{most / 2**20:.0f} MiB more than before (torch {theirs / 2**20:.0f})"
                )
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None  # not to measure a disk
    folder = tempfile.mkdtemp(dir=where)
    try:
        mp.spawn(bench, (arguments.rounds, folder), 2)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The virtual GPU against the CPUs that are here: `make validate`, on a machine without a GPU.

Calibrates (`minifsdp calibrate`), predicts a step of `tutorials/train_gpt.py` on two
ranks from that, and measures it, one right after the other, several times: other work on the
machine disturbs all of it. The aim is 15 % for the time of a step. It says nothing about memory,
since a CPU's allocator is another one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

from minifsdp.sim.__main__ import main as command
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "tutorials"))
from train_gpt import BATCH, CONTEXT, GPT, parse, shard

RANKS, WARM_UP, STEPS = 2, 5, 25
AIM = 0.15
SIZES = {"demo": (4, 128), "wide": (4, 256)}
"""Layers and width; the first are those of `make demo`."""


def demo() -> nn.Module:
    return GPT(*SIZES["demo"])


def wide() -> nn.Module:
    return GPT(*SIZES["wide"])


def predicted(name: str, file: str) -> float:
    """Seconds of a step."""
    words = f"--cluster {file} --model tests.bench.cpu:{name} --batch {BATCH} --seq {CONTEXT}"
    options = parser().parse_args([*words.split(), "--precision", "fp32"])
    step: float = simulate(options).report()["step"]
    return step


def measured(name: str) -> float:
    """Seconds of a step: the median."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, *SIZES[name]), nprocs=RANKS)
        return statistics.median(json.loads(Path(folder, "times").read_text()))


def _rank(rank: int, folder: str, layers: int, width: int) -> None:
    words = f"--device cpu --ranks {RANKS} --layers {layers} --width {width}"
    options = parse(words.split())
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    torch.manual_seed(0)
    model = shard(GPT(layers, width), options)
    optimizer = torch.optim.AdamW(model.parameters())
    rows, times = torch.randint(256, (BATCH, CONTEXT + 1)), []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        Path(folder, "times").write_text(json.dumps(times[WARM_UP:]))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--tries", type=int, default=3)
    tries = p.parse_args(arguments).tries
    print(f"{date.today()}, {RANKS} ranks on CPUs, torch {torch.__version__}; aim {AIM:.0%}")
    print(f"{'a step, ms':16} {'measured':>10} {'predicted':>10}      ratio", flush=True)
    ratios: dict[str, list[float]] = {name: [] for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "cluster.json"))
        for _ in range(tries):
            if command(["calibrate", "--ranks", str(RANKS), "-o", file]):
                return 2
            for name in SIZES:
                here, there = measured(name), predicted(name, file)
                ratios[name].append(there / here)
                times = f"{here * 1e3:10,.1f} {there * 1e3:10,.1f}"
                print(f"{name:16} {times}     {there / here:6.2f}", flush=True)
    middle = {name: statistics.median(each) for name, each in ratios.items()}
    print("median ratio: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in middle.items()))
    return 0 if abs(middle["demo"] - 1) <= AIM else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The virtual GPU against the real one that is here: `make validate`. (Without one: cpu.py.)

One process is rank 0 of 16, in torch's `fake` process group: the real engine, the real allocator,
the real kernels. Only the other ranks are missing. Each collective is replaced by
``torch.cuda._sleep`` of its modelled time, on the stream that it would run on, one at a time, as in
NCCL. So what is compared is everything but the network: kernels, the host, streams, memory.

Aims: 10 % for memory, 15 % for time. Nothing in minifsdp/sim/hardware/costs.py may be
changed for it without saying so there. What came of it: minifsdp/sim/README.md, on a real H100.
"""

import argparse
import gc
import inspect
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn

import minifsdp.core.collectives
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.sim.__main__ import parser
from minifsdp.sim.calibration import host
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import like
from minifsdp.sim.training.presets import find
from minifsdp.sim.training.wrapped import PRECISION, limit_of
from tests.bench import cpu

RUNS = [
    "--model gpt-1.3b --nodes 2 --batch 8 --seq 1024 --limit none",
    "--model gpt-1.3b --nodes 2 --batch 8 --seq 1024 --limit 2",
    "--model t5-500m --nodes 2 --batch 16 --seq 128 --limit none",
    "--model t5-500m --nodes 2 --batch 16 --seq 128 --limit 2",
    "--model gpt-125m --nodes 2 --batch 1 --seq 512 --limit 2",
]
AIMS = {"peak reserved": 0.10, "peak allocated": 0.10, "step": 0.15}
WARM_UP, STEPS = 3, 5
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
"""torch's names for them: since 2.13, and before."""


def name_of(device: str, memory: int) -> str:
    """The preset for what CUDA calls a device.

    Raises:
        ValueError: there is none.
    """
    preset = like(device, memory)
    if preset is None:
        raise ValueError(
            f"no preset in minifsdp/sim/hardware/gpus.py is a {device!r}. Add one, then compare."
        )
    return preset.name


class Sleeping:
    """Collectives that take their time and do nothing else."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: dict[str, torch.cuda.Event] = {}  # by group: it does one thing at a time
        self._cycles = _cycles_per_second()

    def instead_of(self, collective: Callable[..., Any], rounds: int = 1) -> Callable[..., None]:
        signature = inspect.signature(collective)  # not in each call: the host's time counts

        def sleep(*arguments: Any, **named: Any) -> None:
            of = signature.bind(*arguments, **named).arguments
            group: dist.ProcessGroup = of.get("group") or dist.group.WORLD
            ranks = dist.get_process_group_ranks(group)
            whole = max(t.numel() * t.itemsize for t in of.values() if isinstance(t, Tensor))
            sent = whole * (len(ranks) - 1) / len(ranks)
            stream, key = torch.cuda.current_stream(), group.group_name
            if key in self._last:
                stream.wait_event(self._last[key])
            torch.cuda._sleep(
                int(self._cluster.collective_seconds(sent, ranks, rounds) * self._cycles)
            )
            self._last[key] = stream.record_event()

        return sleep


@contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of so many, of which the others are missing."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def modelled_network(cluster: Cluster) -> Iterator[None]:
    """Inside, rank 0 of a cluster computes on the GPU that is here, and its collectives, by whoever
    calls torch's functions for them, take the time that they would take there."""
    core, sleeping = minifsdp.core.collectives, Sleeping(cluster)
    names = [(core, "torch_all_gather"), (core, "torch_reduce_scatter"), (dist, "all_reduce")]
    names += [(dist, name) for name in (*GATHERS, *SCATTERS) if hasattr(dist, name)]
    with rank_0_of(cluster.world_size), ExitStack() as patches:
        for module, name in names:
            rounds = 2 if name == "all_reduce" else 1
            asleep = sleeping.instead_of(getattr(module, name), rounds)
            patches.enter_context(patch.object(module, name, asleep))
        yield


def _cycles_per_second(cycles: int = 100_000_000) -> float:
    torch.cuda._sleep(cycles)  # the first call is slower
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Figures of the real GPU."""
    gpu, around = machine(options)
    cluster = Cluster(gpu, **around)
    job, here = find(options.model), torch.device("cuda", torch.cuda.current_device())
    with modelled_network(cluster), here:
        with torch.device("meta"):
            module = job.build()
        model = FSDP(
            module,
            auto_wrap_policy=ModuleWrapPolicy(set(job.blocks)),
            mixed_precision=PRECISION[options.precision],
            limit_all_gathers=limit_of(options.limit),
            device_id=here,
        )
        return steps_of(model, lambda: job.loss(model, options.batch, options.seq))


def steps_of(model: nn.Module, loss_of: Callable[[], Tensor]) -> dict[str, float]:
    """The median of some steps, in seconds, and the most memory that they take, in bytes."""
    gc.collect()  # what was trained before
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    times = []
    for at in range(WARM_UP + STEPS):
        if at == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return {
        "step": statistics.median(times[WARM_UP:]),
        "peak allocated": torch.cuda.max_memory_allocated(),
        "peak reserved": torch.cuda.max_memory_reserved(),
    }


def compared(measured: dict[str, float], predicted: dict[str, Any]) -> list[str]:
    """A line for each figure that there is an aim for."""
    lines = []
    for name, aim in AIMS.items():
        ratio = predicted[name] / measured[name]
        verdict = "ok" if abs(ratio - 1) <= aim else f"aim: {aim:.0%}"
        scale, unit = (1e3, "ms") if name == "step" else (2**-20, "MiB")
        lines.append(
            f"{name:>16} {measured[name] * scale:10,.1f} {predicted[name] * scale:10,.1f} {unit:3} "
            f"{ratio:6.2f}  {verdict}"
        )
    return lines


def launch_here() -> float:
    """What the host of this machine takes for a kernel, in us."""
    here = torch.device("cuda", torch.cuda.current_device())
    with rank_0_of(1):
        return host.launch(here, dist.distributed_c10d._get_default_group()) * 1e6


def main() -> int:
    if not torch.cuda.is_available():
        return cpu.main([])
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu, launch = name_of(properties.name, properties.total_memory), launch_here()
    print(f"{date.today()}, {properties.name}, torch {torch.__version__}; as {gpu}")
    print(f"predicted with {launch:.1f} us of the host for a kernel, as it takes here")
    print(f"{'':16} {'measured':>10} {'predicted':>10}      ratio")
    record = []
    for run in RUNS:
        options = parser().parse_args([*run.split(), "--gpu", gpu, "--launch", f"{launch:.2f}"])
        measured = measure(options)
        predicted = simulate(options).report()
        print(run, *compared(measured, predicted), sep="\n")
        record.append({"run": run, "measured": measured, "predicted": predicted})
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())

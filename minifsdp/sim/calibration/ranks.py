"""One process for each device of this machine; they measure together and report.

They find each other by a file, so that no port is needed. On a machine with GPUs each rank has one,
with NCCL between them; else each has its share of the CPU's cores, with gloo.
"""

import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import fields
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from minifsdp.sim.calibration import collectives, host, kernels
from minifsdp.sim.calibration.machine import Device, Samples
from minifsdp.sim.cli.terminal import out_of_reach, progress
from minifsdp.sim.hardware.gpus import like


def this_machine(ranks: int) -> Device:
    """What the devices of ``ranks`` ranks are."""
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", memory // ranks, ranks)
    properties = torch.cuda.get_device_properties(0)
    name, memory = properties.name, properties.total_memory
    multiprocessors = properties.multi_processor_count
    return Device(name, memory, ranks, multiprocessors, like(name, memory), cpu=False)


def samples(device: Device) -> Samples:
    """Start the ranks, and put together what they have measured.

    Raises:
        RuntimeError: a rank has failed; says how.
    """
    with tempfile.TemporaryDirectory(prefix="minifsdp-") as folder:
        try:
            resource_tracker.ensure_running()
            with out_of_reach():
                ranks = spawn(_rank, (device, folder), device.ranks, join=False)  # type: ignore[no-untyped-call]
            while not ranks.join():
                pass
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"a rank has failed: {last}") from error
        reports = [pickle.loads(Path(folder, str(r)).read_bytes()) for r in range(device.ranks)]
    together = {
        field.name: [each for report in reports for each in getattr(report, field.name)]
        for field in fields(Samples)
    }
    return Samples(**together)


def _rank(rank: int, device: Device, folder: str) -> None:
    here = torch.device("cpu") if device.cpu else torch.device("cuda", rank)
    if device.cpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // device.ranks))
    else:
        torch.cuda.set_device(here)
    dist.init_process_group(
        "gloo" if device.cpu else "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=device.ranks,
    )
    found = measured(here, device)
    Path(folder, str(rank)).write_bytes(pickle.dumps(found))
    dist.barrier()  # who leaves early hangs up on one that is still measuring
    dist.destroy_process_group()


def measured(here: torch.device, device: Device) -> Samples:
    """On one rank, while the others do the same: they share the host's memory in training, too."""
    group = dist.group.WORLD
    assert group is not None
    low, fp32 = torch.bfloat16, torch.float32
    usual = fp32 if device.cpu else low
    parts: dict[str, Callable[[], list[Any]]] = {
        "collectives": lambda: collectives.alone(here, group),
        "beside": lambda: collectives.beside(here, usual, group),
        "launch": lambda: [host.launch(here, group)],
        "passes": lambda: kernels.passes(here, usual, group),
        "attention": lambda: kernels.attentions(here, usual, group),
        "products_fp32": lambda: kernels.products(here, fp32, device, group),
        "products": lambda: kernels.products(here, low, device, group),
        "host": lambda: [host.bandwidth(group)],
        "copies": lambda: [kernels.copies(here, group)],
        "taken": lambda: [_taken(here)],
    }
    found: dict[str, list[Any]] = {}
    for number, (name, measure) in enumerate(parts.items(), 1):
        if dist.get_rank() == 0:
            progress(f"{number} of {len(parts)} measurements, half a minute in all: {name}")
        found[name] = measure()
    return Samples(**found)


def _taken(here: torch.device) -> int:
    """Bytes that are gone of a GPU's memory beside what PyTorch has reserved."""
    if here.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(here)
    return total - free - torch.cuda.memory_reserved(here)

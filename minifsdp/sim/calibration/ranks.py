"""One process for each device of this machine; they measure together and report.

They find each other by a file, so that no port is needed. On a machine with GPUs each rank has one,
with NCCL between them; else each has its share of the CPU's cores, with gloo.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from minifsdp.sim.calibration import collectives, host, kernels
from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.hardware.gpus import Gpu


@dataclass
class Samples:
    """What one rank, or all of them, have measured. Times are in seconds."""

    products: list[Sample]  # in 16 bits
    products_fp32: list[Sample]
    attention: list[Sample]
    passes: list[Sample]
    collectives: list[Sample]
    beside: list[float]
    launch: list[float]
    host: list[float]  # bytes per second in its memory
    copies: list[float]  # bytes per second between the host and the device
    taken: list[int]  # bytes that CUDA and NCCL have of the device


def measure(ranks: int, like: Gpu, low: torch.dtype) -> list[Samples]:
    """Start the ranks, and collect what they have measured.

    Args:
        like: its tiles and multiprocessors count, where sizes of products do.
        low: the dtype of 16 bits to measure with.

    Raises:
        Exception: a rank has failed.
    """
    with tempfile.TemporaryDirectory(prefix="minifsdp-") as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, like, low), nprocs=ranks)
        reports = (json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks))
        return [
            Samples(**{k: [Sample(*v) if isinstance(v, list) else v for v in vs]
                       for k, vs in report.items()})
            for report in reports
        ]


def _rank(rank: int, ranks: int, folder: str, like: Gpu, low: torch.dtype) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
    )
    found = measured(device, dist.group.WORLD, like, low)
    Path(folder, str(rank)).write_text(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


def measured(device, group, like, low) -> Samples:
    fp32 = torch.float32
    usual = low if device.type == "cuda" else fp32
    dist.barrier(group)  # all at once, as in training
    return Samples(
        products=kernels.products(device, low, like),
        products_fp32=kernels.products(device, fp32, like),
        attention=kernels.attentions(device, usual),
        passes=kernels.passes(device, usual),
        collectives=collectives.alone(device, group),
        beside=[collectives.beside(device, usual, group)],
        launch=[host.launch(device)],
        host=[host.bandwidth()],
        copies=[kernels.copies(device)],
        taken=[_taken(device)],
    )


def _taken(device: torch.device) -> int:
    """What is gone of a GPU's memory beside what PyTorch has reserved."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)

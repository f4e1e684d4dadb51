"""Gathers on a virtual GPU of a cluster of two nodes, and real ones on four ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tutorials.exercises import observe
from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure, on_gpu
from tutorials.exercises.observe import at_most

HARDWARE = {"nodes": 2, "gpus_per_node": 8, "network": 12.5e9}


def on_a_gpu() -> Iterator[Any]:
    """An evaluation has gathers and nothing else to send. Training has to be right, too."""
    from tutorials.exercises.virtual import train

    yield from on_gpu(train([1024] * 12, hardware=HARDWARE))[:1]
    gpu = train([1024] * 12, rows=1024, hardware=HARDWARE, loss=_evaluate)
    yield from on_gpu(gpu)
    yield at_most("reserved bytes", gpu.report()["peak reserved"], slack=0.25)
    yield figure(gpu.report()["step"] * 1e3)


def _evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        value: torch.Tensor = model(x).mean()
    return value.requires_grad_()


def on_four_ranks() -> Iterator[Any]:
    """Two nodes of two ranks. Each chunk has to arrive in its place."""
    import minifsdp.comm.collectives
    import minifsdp.comm.groups
    from minifsdp.core.collectives import TorchCollectives
    from tutorials.exercises import parallel

    minifsdp.comm.collectives.NATIVE = True  # as on GPUs
    minifsdp.comm.groups.hosts_of = lambda group: [
        f"node {rank // 2}" for rank in dist.get_process_group_ranks(group)
    ]
    world = dist.group.WORLD
    assert world is not None
    for n in (1, 5):
        full, chunk = torch.zeros(4 * n), torch.arange(n) + 100.0 * dist.get_rank()
        TorchCollectives().all_gather(None, full, chunk, world)()
        yield f"the gathered tensor, chunks of {n}", full
    observe.reference = False  # with four ranks DDP adds up in another order than FSDP
    yield from parallel.train()


CHECKS = [Check(on_a_gpu, 1, 20, because), Check(on_four_ranks, 4, 20, because)]

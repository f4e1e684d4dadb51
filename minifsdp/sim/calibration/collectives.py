"""Samples of collectives, as minifsdp does them (comm/collectives.py): alone, and beside products.

All ranks of the group call these functions together.
"""

from functools import partial

import torch
import torch.distributed as dist

from minifsdp.comm.collectives import all_gather, all_reduce, reduce_scatter
from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.timing import seconds

CUDA_SIZES = (2**16, 2**20, 2**24, 2**26)
CPU_SIZES = (2**12, 2**16, 2**18, 2**20)
"""Elements of 4 bytes, of all ranks together."""
TAG = 0  # one after the other, so that all may have the same


def alone(device: torch.device, group: dist.ProcessGroup) -> list[Sample]:
    """All-gathers, reduce-scatters and all-reduces of several sizes: by steps of a ring, and by
    bytes that a rank sends."""
    ranks, samples = group.size(), []
    for numel in CUDA_SIZES if device.type == "cuda" else CPU_SIZES:
        full = torch.ones(numel // ranks * ranks, device=device)
        steps, sent = ranks - 1, full.nbytes * (ranks - 1) / ranks
        for rounds, work in ((1, _gather), (1, _scatter), (2, _reduce)):
            took = seconds(partial(work, full, group), device, group)
            samples.append(Sample(rounds * steps, rounds * sent, took))
    return samples


def _gather(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    all_gather(full, full.new_empty(full.numel() // group.size()), group, TAG)()


def _scatter(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(full, group, 1 / group.size(), TAG)[1]()


def _reduce(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    for finish in all_reduce(full, group, 1 / group.size(), TAG):
        finish()


def beside(device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> float:
    """The speed of products while an all-gather runs, to that without; between 0.05 and 1.

    Products that take three times as long as the gather are started behind it. If they are done so
    much later than without it, they were so much slower meanwhile.
    """
    full = torch.ones((CUDA_SIZES if device.type == "cuda" else CPU_SIZES)[-1], device=device)
    full = full[: full.numel() // group.size() * group.size()]
    chunk = full.new_empty(full.numel() // group.size())
    side = 4096 if device.type == "cuda" else 256
    factor = torch.ones(side, side, device=device, dtype=dtype)
    gather = seconds(partial(_gather, full, group), device, group)
    product = seconds(lambda: factor @ factor, device, group)
    count = torch.tensor(3 * gather / product, device=device)
    dist.broadcast(count, group=group, group_src=0)
    repeat = int(count.item()) + 1

    def compute() -> None:
        for _ in range(repeat):
            factor @ factor

    def both() -> None:
        finish = all_gather(full, chunk, group, TAG)
        compute()
        finish()

    lost = seconds(both, device, group) - seconds(compute, device, group)
    return min(max(1 - lost / gather, 0.05), 1.0)

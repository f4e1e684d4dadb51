"""Samples of collectives, as minifsdp does them (comm/collectives.py): alone, and beside products.

All ranks of the group call these functions together.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.chunks.layout import FeaturedChunks
from minifsdp.comm.collectives import all_reduce, direct
from minifsdp.comm.message_tags import Launches
from minifsdp.comm.neighbors import find_neighbors
from minifsdp.core.streams import Finish
from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.timing import seconds
from minifsdp.strategies import comm_of
from minifsdp.users_comm import UsersComm

CUDA_SIZES = (2**16, 2**20, 2**24, 2**26)
CPU_SIZES = (2**12, 2**16, 2**18, 2**20)
"""Elements of 4 bytes, of all ranks together."""


def chunks(numel: int, group: dist.ProcessGroup, tag: int = 0) -> Any:
    """What collectives ask of a unit of ``numel`` elements that the ranks of ``group`` share.

    Args:
        tag: units whose collectives are under way at the same time need different ones.
    """
    layout = FeaturedChunks([torch.Size([numel])], group.size())
    launches = defaultdict[str, Launches](Launches)
    return SimpleNamespace(
        shard_group=group, layout=layout, tag=tag, label="", launches=launches,
        users_comm=UsersComm(),
    )  # fmt: skip


def alone(here: torch.device, group: dist.ProcessGroup) -> list[Sample]:
    """All-gathers, reduce-scatters and all-reduces of several sizes: by steps of a ring, and by
    bytes that a rank sends."""
    ranks, samples = group.size(), []
    if direct(here):
        find_neighbors(group)  # as a model does, before its first step
    for numel in _sizes(here) if ranks > 1 else ():
        full = torch.ones(numel // ranks * ranks, device=here)
        steps, sent = ranks - 1, full.nbytes * (ranks - 1) / ranks
        for rounds, work in ((1, _gather), (1, _scatter), (2, _reduce)):
            took = seconds(partial(work, full, group), here, group)
            samples.append(Sample(rounds * steps, rounds * sent, took))
    return samples


def _start_gather(full: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    unit, chunk = chunks(full.numel(), group), full.new_empty(full.numel() // group.size())
    finish: Finish = comm_of(unit, full.device).all_gather(unit, full, chunk, group)
    return finish


def _gather(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    _start_gather(full, group)()


def _scatter(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    unit = chunks(full.numel(), group)
    comm_of(unit, full.device).reduce_scatter(unit, full, 1 / group.size())[1]()


def _reduce(full: torch.Tensor, group: dist.ProcessGroup) -> None:
    if direct(full.device):
        for finish in all_reduce(full, group, 1 / group.size()):
            finish()
    else:
        unit = chunks(full.numel(), group)
        comm: Any = comm_of(unit, full.device)
        comm.all_reduce(unit, full, 1 / group.size(), group)()


def beside(here: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> list[float]:
    """What products lose beside an all-gather, in shares of the time that it takes alone.

    Products that take three times as long are started behind it. If they are done later than
    without it, that much is lost. On a GPU it is a small share; on CPUs more than all, where
    threads that send wait for a core that computes.
    """
    if group.size() < 2:
        return []
    side = 4096 if here.type == "cuda" else 256
    factor = torch.ones(side, side, device=here, dtype=dtype)
    product = seconds(lambda: factor @ factor, here, group)
    return [_lost(size, factor, product, group) for size in _sizes(here)[1:]]


def _lost(numel: int, factor: torch.Tensor, product: float, group: dist.ProcessGroup) -> float:
    here, ranks = factor.device, group.size()
    full = torch.ones(numel // ranks * ranks, device=here)
    gather = seconds(partial(_gather, full, group), here, group)
    repeat = int(3 * gather / product) + 1  # the same on all ranks, as both times are

    def compute() -> None:
        for _ in range(repeat):
            factor @ factor

    def both() -> None:
        finish = _start_gather(full, group)
        compute()
        finish()

    return max(seconds(both, here, group) - seconds(compute, here, group), 0.0) / gather


def _sizes(here: torch.device) -> tuple[int, ...]:
    return CUDA_SIZES if here.type == "cuda" else CPU_SIZES

"""How long something takes on a device: CUDA's, which does it later, or the CPU's."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from minifsdp.comm.collectives import add_up

BATCHES = 9
"""The median of so many counts. Training is disturbed, too, by whatever else a machine does."""
LONG_ENOUGH = 0.01
"""Seconds of a batch. Short calls are repeated until it takes so long, so that the clock and the
wait at the end do not count."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told. A CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(
    work: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Of one call of ``work``, the median of several batches.

    Args:
        group: all of its ranks do this together, and have to call it as often as each other.
    """
    work()  # the first call is slower
    count = torch.tensor(max(1.0, LONG_ENOUGH / max(_batch(work, 1, device), 1e-7)), device=device)
    if group is not None:
        add_up(count, group, largest=True)
    repeat = int(count.item())
    return statistics.median(_batch(work, repeat, device) for _ in range(BATCHES))


def _batch(work: Callable[[], object], count: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / count

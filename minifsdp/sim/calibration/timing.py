"""How long something takes on a device: CUDA's, which does it later, or the CPU's."""

import time
from collections.abc import Callable

import torch

from minifsdp.comm.collectives import add_up
from minifsdp.core.collectives import Group

BATCHES = 9
"""The median of so many counts. Training is disturbed, too, by whatever else a machine does."""
LONG_ENOUGH = 0.01
"""Seconds of a batch. Short calls are repeated until it takes so long, so that the clock and the
wait at the end do not count."""


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told. A CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, group: Group) -> float:
    """Of one call of ``work``, the median of several batches.

    All ranks of ``group`` do it at the same time, and the slowest counts: in training the others
    wait for it at the next collective. Where ranks share a noisy machine that makes a third of a
    step, though each of them, timed for itself, is as fast as alone.
    """
    work()  # the first call is slower
    count = torch.tensor(max(1.0, LONG_ENOUGH / max(_batch(work, 1, device), 1e-7)), device=device)
    add_up(count, group, largest=True)  # work may be a collective, so all call it as often
    times = torch.zeros(BATCHES, dtype=torch.float64, device=device)
    for at in range(BATCHES):
        add_up(torch.zeros(1, device=device), group)  # they begin together
        times[at] = _batch(work, int(count.item()), device)
    add_up(times, group, largest=True)
    return times.median().item()


def _batch(work: Callable[[], object], count: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - begin) / count

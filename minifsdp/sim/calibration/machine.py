"""Samples in, a GPU and what is around it out: the constants of hardware/gpus.py and costs.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from minifsdp.sim.calibration.fit import Sample, fit
from minifsdp.sim.hardware.cluster_file import CLUSTER
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import Gpu, preset

LINKS_REACHED = 0.8
"""As of hardware/costs.Cluster. What is measured has been reached, so links are said to be that
much faster."""
SLOWEST = 0.05
"""Of products' speed, what is left of it at least beside a collective."""
ERROR = 0.15
"""Of predictions with a file's constants. No published runs are there to tell it from; on CPUs the
demo's step comes within it (README.md)."""


@dataclass
class Samples:
    """What one rank, or all of them, have measured. Times are in seconds."""

    products: list[Sample]  # in 16 bits
    products_fp32: list[Sample]
    attention: list[Sample]  # on CUDA in 16 bits, on a CPU in fp32
    passes: list[Sample]
    collectives: list[Sample]
    beside: list[float]  # what products lose beside a collective, to what that takes alone
    launch: list[float]
    host: list[float]  # bytes per second in its memory
    copies: list[float]  # bytes per second between the host and the device
    taken: list[int]  # bytes that CUDA and NCCL have of the device


@dataclass(frozen=True)
class Device:
    """What a device says of itself; ``like`` is the preset for it, if there is one, whose data
    sheet flops are counted against."""

    name: str
    memory: int
    ranks: int
    multiprocessors: int = 1
    like: Gpu | None = None
    cpu: bool = True

    @property
    def tile(self) -> int:
        """Rows and columns of a tile. A CPU's are so small that part of one is not noticed."""
        return 1 if self.cpu else 128


def gpu_of(found: Samples, device: Device) -> Gpu:
    """A GPU with the constants that were measured; where there are no samples, those of the preset
    that it is like."""
    like = device.like
    gpu = replace(
        like or preset("a100-40"),
        name=device.name,
        memory=device.memory,
        multiprocessors=device.multiprocessors,
        error=ERROR,
        tile=device.tile,
    )
    if found.products:
        low, overhead = _rate(found.products)
        gpu = replace(gpu, tile_overhead=overhead, **_share(like, "flops", "products", low))
    if found.products_fp32:
        fp32, overhead = _rate(found.products_fp32)
        gpu = replace(gpu, **_share(like, "flops_fp32", "products_fp32", fp32))
        if like is None:  # as if it had no TF32, which nobody has measured
            gpu = replace(gpu, flops_tf32=gpu.flops_fp32, products_tf32=gpu.products_fp32)
        if device.cpu or not found.products:
            gpu = replace(gpu, tile_overhead=overhead)
    if found.attention:
        reached, overhead = _rate(found.attention)
        if device.cpu:  # in 16 bits it was not measured, and is taken to reach the same share
            share = reached / gpu.flops_fp32
            gpu = replace(gpu, attention=share, attention_fp32=share)
        else:
            gpu = replace(gpu, attention=reached / gpu.flops)
        gpu = replace(gpu, row_overhead=overhead)
    if found.passes:
        bytes_per_second = 1 / _not_zero(found.passes, 1)
        gpu = replace(gpu, **_share(like, "bandwidth", "passes", bytes_per_second))
    if found.collectives:
        seconds = _not_zero(found.collectives, 1) * _longer(found)
        gpu = replace(gpu, links=1 / seconds / LINKS_REACHED)
    if found.copies:
        gpu = replace(gpu, pcie=mean(found.copies) / LINKS_REACHED)
    return gpu


def around(found: Samples, device: Device) -> dict[str, Any]:
    """Constants of the cluster around it; where there are no samples, the usual ones."""
    usual = Cluster(gpu_of(found, device))
    constants = {name: getattr(usual, name) for name in CLUSTER}
    constants |= {"gpus_per_node": device.ranks, "host_computes": device.cpu}
    if device.cpu:  # it launches nothing, and asks for memory as one goes along
        constants |= {"kernel": 0.0, "cuda_malloc": 0.0, "cuda_free": 0.0}
    if found.collectives:
        constants["alpha_node"] = fit(found.collectives)[0] * _longer(found)
    if found.beside:
        constants["beside_collectives"] = min(max(1 - median(found.beside), SLOWEST), 1.0)
    if found.host:
        constants["host_memory"] = mean(found.host) * device.ranks
    if found.launch:
        constants["launch"] = mean(found.launch)
        # Both are Python's; one that is slower here is slower there.
        constants["moment"] = usual.moment * constants["launch"] / usual.launch
    if found.taken:
        constants["taken"] = max(found.taken)
    return constants


def _longer(found: Samples) -> float:
    """How many times as long collectives take in training: where products lose more time beside one
    than it takes alone, it is that much longer itself."""
    return max(median(found.beside), 1.0) if found.beside else 1.0


def _rate(samples: Sequence[Sample]) -> tuple[float, float]:
    """Flops per second; and what is begun with, in units of what ``second`` divides them by."""
    seconds = _not_zero(samples, 0)
    return 1 / seconds, fit(samples)[1] / seconds


def _not_zero(samples: Sequence[Sample], part: int) -> float:
    """One of the two constants, which cannot be 0. Where noise has left nothing for it, all the
    time is taken to be its."""
    other = {"second": 0.0} if part == 0 else {"first": 0.0}
    return fit(samples)[part] or fit([sample._replace(**other) for sample in samples])[part]


def _share(like: Gpu | None, peak: str, share: str, measured: float) -> dict[str, Any]:
    """A peak and the share of it that is reached. Of an unknown peak that is all that is known."""
    known = getattr(like, peak) if like else measured
    return {peak: known, share: measured / known}

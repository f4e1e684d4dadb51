"""Samples of kernels: how long products, attention, passes and copies take on a device.

What is timed is a piece of ordinary PyTorch. What it asks of the device is found out as on the
virtual GPU: a dispatch mode sees each operator, and hardware/kernels.py says what it is. So a
constant that is fitted here and a cost that is computed from it there are about the same thing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from minifsdp.core.collectives import Group
from minifsdp.core.outputs import tensors_in
from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.machine import Device
from minifsdp.sim.calibration.timing import seconds
from minifsdp.sim.calls import NO_WORK, Call, accesses
from minifsdp.sim.hardware.costs import filled, relative_speed
from minifsdp.sim.hardware.kernels import PASS, PRODUCT, Kernel, kernel_of

Work = Callable[[], object]

LAYERS = 4
"""Results that are in memory at the same time. One at a time would always be in the same memory, as
no layers' are; to have the system clear other memory takes a CPU longer than to compute with it."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the kernels that are run inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        read, written = accesses(operation, args, kwargs or {})
        there = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        made = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in there]
        call = Call(operation, args, kwargs or {}, read, written, made, result)
        if (made or written) and call.name not in NO_WORK:
            self.kernels.append(kernel_of(call))
        return result


def kernels_of(work: Work) -> list[Kernel]:
    """What a piece of work asks of a device."""
    watch = Watch()
    with watch:
        work()
    return watch.kernels


def products(here: torch.device, dtype: torch.dtype, device: Device, group: Group) -> list[Sample]:
    """Of matrices of several sizes."""
    samples = []
    for rows, inner, columns in sizes(here, dtype):
        left = torch.randn(rows, inner, device=here).to(dtype)
        right = torch.randn(columns, inner, device=here).to(dtype).t()  # as a weight lies

        def work(left: Tensor = left, right: Tensor = right) -> object:
            return [left @ right for _ in range(LAYERS)]

        kernel = next(k for k in kernels_of(work) if k.kind == PRODUCT)
        samples.append(product_sample(kernel, device, seconds(work, here, group) / LAYERS))
    return samples


def product_sample(kernel: Kernel, device: Device, took: float) -> Sample:
    """By flops, and by flops for each step along the inner size; as many as the waves of tiles
    would have, if all were full."""
    flops = kernel.done / filled(kernel, device.tile, device.multiprocessors)
    return Sample(flops, flops / kernel.shape[3], took)


def sizes(here: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Rows, inner size and columns: of layers that keep such a device busy for a while. CPUs are
    slow with 16 bits, which nobody trains in there, so that few will do."""
    unit = 1024 if here.type == "cuda" else 128
    layers = ((1, 3), (4, 1), (1, 4), (2, 2), (4, 8), (8, 4))
    few = here.type == "cpu" and dtype is not torch.float32
    return [(8 * unit, i * unit, c * unit) for i, c in layers[: 2 if few else None]]


def attentions(here: torch.device, dtype: torch.dtype, group: Group) -> list[Sample]:
    """Of texts of several lengths, forward and backward: by flops, and by flops for each key."""
    samples = []
    lengths = (512, 1024, 2048, 4096) if here.type == "cuda" else (64, 128, 256)
    for length in lengths:
        shape = 16 * lengths[0] // length or 1, 8, length, 64
        q, k, v = (torch.randn(shape, device=here).to(dtype).requires_grad_() for _ in range(3))

        def work(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        kernels = [kernel for kernel in kernels_of(work) if kernel.kind not in (PASS, PRODUCT)]
        done = sum(kernel.done / relative_speed(kernel) for kernel in kernels)
        if done:  # else it was done the plain way, "math"
            samples.append(Sample(done, done / length, seconds(work, here, group)))
    return samples


def passes(here: torch.device, dtype: torch.dtype, group: Group) -> list[Sample]:
    """Of what is between the products of a transformer, forward and backward: by the number of
    kernels, and by bytes."""
    samples = []
    unit = 2048 if here.type == "cuda" else 64
    for width in (unit, 2 * unit, 4 * unit):
        narrow = torch.randn(16 * unit, width, device=here).to(dtype).requires_grad_()
        wide = torch.randn(16 * unit, 4 * width, device=here).to(dtype).requires_grad_()
        norm = torch.nn.LayerNorm(width, device=here, dtype=dtype)

        def work(narrow: Tensor = narrow, wide: Tensor = wide, norm: Any = norm) -> object:
            x, y = narrow, wide
            for _ in range(LAYERS):
                x, y = x + norm(x) + norm(x), functional.gelu(y)
            given = (x, y), (narrow, wide, *norm.parameters())
            return torch.autograd.grad(*given, (x.detach(), y.detach()))

        kernels = kernels_of(work)
        moved = sum(kernel.moved for kernel in kernels)
        samples.append(Sample(len(kernels), moved, seconds(work, here, group)))
    return samples


def copies(here: torch.device, group: Group) -> float:
    """Bytes per second from the host's memory to the device; for a CPU, within it."""
    source = torch.ones(2**24, pin_memory=here.type == "cuda")
    target = torch.empty_like(source, device=here)
    return source.nbytes / seconds(lambda: target.copy_(source, non_blocking=True), here, group)

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

from minifsdp.sim.calibration.fit import Sample
from minifsdp.sim.calibration.timing import seconds
from minifsdp.sim.calls import NO_WORK, Call, accesses
from minifsdp.sim.hardware.costs import filled, relative_speed
from minifsdp.sim.hardware.gpus import Gpu
from minifsdp.sim.hardware.kernels import PASS, PRODUCT, Kernel, kernel_of
from minifsdp.support.pytree import tensors_in

Work = Callable[[], object]


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
    with Watch() as watch:
        work()
    return watch.kernels


def products(device: torch.device, dtype: torch.dtype, gpu: Gpu) -> list[Sample]:
    """Of matrices of several sizes: by flops, and by flops for each step along the inner size.

    Args:
        gpu: its tiles and multiprocessors count.
    """
    samples = []
    for rows, inner, columns in sizes(device):
        left = torch.randn(rows, inner, device=device).to(dtype)
        right = torch.randn(columns, inner, device=device).to(dtype).t()  # as a weight lies

        def work(left: Tensor = left, right: Tensor = right) -> object:
            return left @ right

        (kernel,) = (k for k in kernels_of(work) if k.kind == PRODUCT)
        samples.append(product_sample(kernel, gpu, seconds(work, device)))
    return samples


def product_sample(kernel: Kernel, gpu: Gpu, took: float) -> Sample:
    """One, from any source."""
    flops = kernel.done / filled(kernel, gpu)
    return Sample(flops, flops / kernel.shape[3], took)


def sizes(device: torch.device) -> list[tuple[int, int, int]]:
    """Rows, inner size and columns: of layers' sizes that keep such a device busy for a while."""
    unit = 1024 if device.type == "cuda" else 128
    return [
        (8 * unit, inner * unit, columns * unit)
        for inner, columns in ((1, 3), (1, 4), (4, 1), (2, 2), (4, 8), (8, 4))
    ]


def attentions(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Of texts of several lengths, forward and backward: by flops, and by flops for each key."""
    samples = []
    lengths = (512, 1024, 2048, 4096) if device.type == "cuda" else (64, 128, 256)
    for length in lengths:
        shape = 16 * lengths[0] // length or 1, 8, length, 64
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

        def work(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

        kernels = [kernel for kernel in kernels_of(work) if kernel.kind not in (PASS, PRODUCT)]
        done = sum(kernel.done / relative_speed(kernel) for kernel in kernels)
        if done:  # else it was done the plain way, "math"
            samples.append(Sample(done, done / length, seconds(work, device)))
    return samples


def passes(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Of what is between the products of a transformer, forward and backward: by the number of
    kernels, and by bytes."""
    samples = []
    unit = 2048 if device.type == "cuda" else 64
    for width in (unit, 2 * unit, 4 * unit):
        narrow = torch.randn(16 * unit, width, device=device).to(dtype).requires_grad_()
        wide = torch.randn(16 * unit, 4 * width, device=device).to(dtype).requires_grad_()
        norm = torch.nn.LayerNorm(width, device=device, dtype=dtype)

        def work(narrow: Tensor = narrow, wide: Tensor = wide, norm: Any = norm) -> object:
            out = narrow + norm(narrow) + norm(narrow)
            activated = functional.gelu(wide)
            given = (out, activated), (narrow, wide, *norm.parameters())
            return torch.autograd.grad(*given, (out.detach(), activated.detach()))

        kernels = kernels_of(work)
        moved = sum(kernel.moved for kernel in kernels)
        samples.append(Sample(len(kernels), moved, seconds(work, device)))
    return samples


def copies(device: torch.device) -> float:
    """Bytes per second from the host's memory to the device; for a CPU, within it."""
    there = torch.ones(2**24, pin_memory=device.type == "cuda")
    here = torch.empty_like(there, device=device)
    return there.nbytes / seconds(lambda: here.copy_(there, non_blocking=True), device)

"""What an operator asks of a GPU: a matrix product, attention, or a pass over its tensors.

Kernels of these kinds reach very different shares of what a GPU could do, so costs.py has to know
which one it is, and the shape of a product: on a GPU it is cut into tiles, which are shared out
among the multiprocessors.

Additions and multiplications are counted as those count who publish them: attention in full, though
a causal one does half of it (PaLM, arXiv:2204.02311, appendix B); ``done`` is what the kernel does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from minifsdp.core.outputs import tensors_in
from minifsdp.sim.calls import Call, nbytes

PRODUCT, ATTENTION, ATTENTION_BACKWARD, PASS = "product", "attention", "attention backward", "pass"


@dataclass(frozen=True)
class Kernel:
    """One operator, as work.

    Attributes:
        kind: one of the four above.
        moved: bytes read and written.
        low: it computes in 16 bits.
        flops: as they are counted for publication.
        done: of these, what the kernel really does.
        shape: of a product, ``(products, rows, columns, inner size)``; of attention,
            ``(batch x heads, queries, keys, head size)``.
        tf32: if in 32 bits, its factors may be rounded to TF32, as
            ``torch.backends.cuda.matmul.allow_tf32`` says, and cuDNN's for convolutions.
    """

    kind: str
    moved: int
    low: bool
    flops: float = 0.0
    done: float = 0.0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    tf32: bool = False


def kernel_of(call: Call) -> Kernel:
    """The work that a call is."""
    low = any(t.dtype in (torch.bfloat16, torch.float16) for t in call.used)
    if "attention" in call.name and "math" not in call.name:
        return _attention(call, low)
    if "convolution" in call.name:
        return _convolution(call, low)
    formula: Callable[..., int] | None = flop_registry.get(call.operation.overloadpacket)
    if formula is None:
        again = sum(map(nbytes, tensors_in(_read_too(call))))
        return Kernel(PASS, call.moved + again, low)
    flops = float(formula(*call.args, **call.kwargs, out_val=call.result))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return Kernel(PRODUCT, call.moved, low, flops, flops, _product(call, flops), tf32)


def _read_too(call: Call) -> list[Any]:
    """What a kernel reads and writes, and is counted twice: a fused Adam's parameters and moments.
    Of others that work in place the target is counted once, and the shares of gpus.py were fitted
    so.
    """
    parameters, _, *moments = call.args[:4] if call.name.startswith("_fused_adam") else [[], []]
    return [parameters, moments]


def _attention(call: Call, low: bool) -> Kernel:
    backward = call.name.endswith("_backward")
    given = _by_name(call)
    q, k = given["query"], given["key"]
    *batch, queries, width = q.shape
    heads, keys = torch.Size(batch).numel(), k.shape[-2]
    product = 2.0 * heads * queries * keys * width
    # Two products forward, four backward. The backward's fifth, the scores once more, is not
    # counted, as nothing is that is computed again.
    flops, done = (4 * product, 5 * product) if backward else (2 * product, 2 * product)
    if given.get("is_causal"):
        done /= 2
    kind = ATTENTION_BACKWARD if backward else ATTENTION
    return Kernel(kind, call.moved, low, flops, done, (heads, queries, keys, width))


def _by_name(call: Call) -> dict[str, Any]:
    names = (argument.name for argument in call.operation._schema.arguments)
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _convolution(call: Call, low: bool) -> Kernel:
    """A product of unfolded pictures: a row for each place, a column for each channel that comes
    out. Its backward, two products of other shapes, is taken for two of this shape. (torch's own
    count of a backward in groups is as many times too high as there are groups.)"""
    given = _by_name(call)
    out, weight, groups = given.get("grad_output", call.result), given["weight"], given["groups"]
    shape = groups, out.numel() // out.shape[1], out.shape[1] // groups, weight[0].numel()
    flops = 2.0 * prod(shape) * sum(given.get("output_mask", (True,))[:2])
    tf32 = torch.backends.cudnn.allow_tf32  # which torch has on by default
    return Kernel(PRODUCT, call.moved, low, flops, flops, shape, tf32)


def _product(call: Call, flops: float) -> tuple[int, int, int, int]:
    factors: list[Any] = [t for t in call.read if t.dim() in (2, 3)][-2:]
    if "mm" not in call.name or len(factors) < 2:
        side = max(round((flops / 2) ** (1 / 3)), 1)
        return 1, side, side, side
    (*batch, rows, inner), columns = factors[0].shape, factors[1].shape[-1]
    return torch.Size(batch).numel(), rows, columns, inner

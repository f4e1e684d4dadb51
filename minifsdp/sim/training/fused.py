"""A Llama's norm, rotary embedding and SwiGLU, each in one kernel forward and one backward.

Llama's own code has a kernel for each step of them: a cast, a square, a mean, and so on. Each reads
and writes a tensor as large as the activations, in 32 bits, and most are kept for the backward. One
kernel reads what comes in and writes what goes out; for the backward only what comes in is kept.

Sources: the kernels of Apex (RMSNorm), flash-attn (rotary) and xFormers (SwiGLU), as TinyLlama and
many others have used them; Hsu et al., "Liger Kernel", arXiv:2410.10989, has all three.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minifsdp.sim.training.llama import EPS, Kernels, LlamaBlock, RmsNorm, rotated

_LIBRARY: Any = torch.library.Library("minifsdp_fused", "DEF")  # type: ignore[no-untyped-call]
_OPS: Any = torch.ops.minifsdp_fused


def _define(schema: str, kernel: Any) -> None:
    """An operator, which is one kernel to the virtual GPU, whatever it calls itself."""
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")


def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return (x.float() * scale).type_as(x) * weight, scale


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y, inner = x.float() * scale, (grad * weight).float()
    to_x = scale * (inner - y * (inner * y).mean(-1, keepdim=True))
    return to_x.type_as(x), (grad * y.type_as(x)).flatten(0, -2).sum(0)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(gate.float())
    to_gate = grad * up * share * (1 + gate * (1 - share))
    return to_gate.type_as(gate), (grad * gate * share).type_as(up)


_define("norm(Tensor x, Tensor weight) -> (Tensor, Tensor)", _norm)
_define(
    "norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    _norm_backward,
)
_define(
    "rotate(Tensor q, Tensor k, Tensor angles) -> (Tensor, Tensor)",
    lambda q, k, angles: (rotated(q, angles), rotated(k, angles)),
)
_define(
    "rotate_backward(Tensor q, Tensor k, Tensor angles) -> (Tensor, Tensor)",
    lambda q, k, angles: (rotated(q, angles.conj()), rotated(k, angles.conj())),
)
_define("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu)
_define(
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", _swiglu_backward
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, scale = _OPS.norm(x, weight)
        context.save_for_backward(x, weight, scale)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        return _OPS.norm_backward(grad, *context.saved_tensors)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, angles: Tensor) -> Any:
        context.save_for_backward(angles)
        return _OPS.rotate(q, k, angles)

    @staticmethod
    def backward(context: Any, to_q: Tensor, to_k: Tensor) -> Any:
        return *_OPS.rotate_backward(to_q, to_k, *context.saved_tensors), None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor) -> Tensor:
        context.save_for_backward(gate, up)
        return _OPS.swiglu(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        return _OPS.swiglu_backward(grad, *context.saved_tensors)


FUSED = Kernels(
    norm=_Norm.apply,
    rotate=_Rotate.apply,
    swiglu=lambda gate, up, x: _Swiglu.apply(gate(x), up(x)),  # type: ignore[no-untyped-call]
)


def fuse(module: nn.Module) -> bool:
    """Let all parts of a Llama use these kernels. Returns whether there are any."""
    parts = [part for part in module.modules() if isinstance(part, (RmsNorm, LlamaBlock))]
    for part in parts:
        part.kernels = FUSED
    return bool(parts)

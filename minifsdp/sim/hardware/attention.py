"""Attention as a GPU runs it: in one kernel, which never stores the matrix of scores.

``scaled_dot_product_attention`` picks its kernel by the device. For tensors without values it knows
none, and takes the plain way, "math": a product, a softmax, a product, with scores of shape
``[batch, heads, queries, keys]`` in memory, in fp32 where the model has 16 bits. No GPU of today
does that for an ordinary model. So on a virtual GPU the choice is made by CUDA's rules:

=========  ==================================================================================
flash      16 bits, no mask, one head size for queries, keys and values, of at most 256;
           ``is_causal`` with as many queries as keys
cudnn      the same with heads of at most 128, and masks that need no gradient; on Hopper, first
efficient  16 or 32 bits, masks; head sizes that are a multiple of 8 (in 32 bits: of 4)
math       everything else
=========  ==================================================================================

``--attention triton`` is flash with another author: the same choice and the same memory, and the
time of the kernel that was written in Triton before FlashAttention-2, which many training runs of
2022 and 2023 used (:data:`minifsdp.sim.hardware.costs.TRITON`).

``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cuda.enable_flash_sdp`` are obeyed, as they
are on a GPU.

Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (the rules) and
``transformers/attention.cpp`` (what masks and odd head sizes are turned into). FlashAttention is
Dao, arXiv:2307.08691; "efficient" is xFormers', after Rabe and Staats, arXiv:2112.05682.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

LOW = (torch.float16, torch.bfloat16)

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "triton": SDPBackend.FLASH_ATTENTION,
}


@contextmanager
def attention(prefers_cudnn: bool) -> Iterator[None]:
    """Inside, tensors without values have a GPU's attention.

    Args:
        prefers_cudnn: the GPU is one of those where torch takes cuDNN's kernel first.
    """

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kernel = choose(q, k, v, mask, causal, prefers_cudnn)
        if kernel == "math":
            out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
            )[0]
            return out
        return _FUSED[kernel](q, k, v, mask, dropout, causal, scale)

    # In front of autograd, so that the chosen kernel brings its own backward.
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", attend, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def only(name: str) -> Iterator[None]:
    """What ``--attention`` asks for: one kernel, or any of them (``auto``).

    Raises:
        RuntimeError: inside, where that one cannot do what is asked of it.
    """
    if name == "auto":
        yield
    else:
        with sdpa_kernel(BACKENDS[name]):
            yield


def choose(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, prefers_cudnn: bool
) -> str:
    """The kernel that CUDA would run, by its name in :data:`BACKENDS`.

    Args:
        q, k, v: ``[..., queries or keys, head size]``.

    Raises:
        RuntimeError: those that can do it are switched off.
    """
    cuda: Any = torch.backends.cuda
    low = all(tensor.dtype in LOW for tensor in (q, k, v))
    dense = all(tensor.stride(-1) == 1 for tensor in (q, k, v)) and q.dim() == 4
    one_size = q.shape[-1] == k.shape[-1] == v.shape[-1]
    square = not causal or q.shape[-2] == k.shape[-2]
    flash = low and dense and mask is None and one_size and square and q.shape[-1] <= 256
    multiple = 8 if low else 4
    aligned = q.shape[-1] % multiple == 0 and v.shape[-1] % multiple == 0
    efficient = dense and aligned and (low or q.dtype is torch.float32)
    small = low and dense and one_size and q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    if mask is not None and mask.requires_grad:
        small = False
    can = {
        "flash": flash and cuda.flash_sdp_enabled(),
        "cudnn": small and cuda.cudnn_sdp_enabled(),
        "efficient": efficient and cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    order = ("flash", "efficient", "math")
    for name in ("cudnn", *order) if prefers_cudnn else (*order, "cudnn"):
        if can[name]:
            return name
    raise RuntimeError(
        f"none of the attention kernels that are switched on can do this: queries {_said(q)}, "
        f"keys {_said(k)}, {'a mask' if mask is not None else 'no mask'}, "
        f"{'causal' if causal else 'not causal'}. Switch on others (torch.nn.attention.sdpa_kernel)"
    )


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: Any) -> Tensor:
    width = q.shape[-1]
    if width % 8:  # its kernels are made for multiples
        q, k, v = (functional.pad(tensor, (0, 8 - width % 8)) for tensor in (q, k, v))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, dropout, causal, scale=scale
    )[0]
    return out[..., :width]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: Any) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, *_as_many_heads(q, k, v), _to_add(mask, q, k), True, dropout, causal, scale=scale
    )[0]
    return out


def _efficient(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: Any
) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, *_as_many_heads(q, k, v), _to_add(mask, q, k), True, dropout, causal, scale=scale
    )[0]
    return out


def _as_many_heads(q: Tensor, *others: Tensor) -> Iterator[Tensor]:
    """Keys and values for each head of the queries; copies, where several shared one."""
    for tensor in others:
        times = q.shape[1] // tensor.shape[1]
        yield tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _to_add(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as a summand for the scores: what is not to be seen gets minus infinity."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, float("-inf"))
    return mask.expand(*q.shape[:-1], k.shape[-2])


_FUSED = {"flash": _flash, "cudnn": _cudnn, "efficient": _efficient}

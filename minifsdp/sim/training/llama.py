"""Llama 2 and 3, arXiv:2307.09288 and arXiv:2407.21783: what differs from GPT's layers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from minifsdp.sim.training.models import logits_or_loss

EPS = 1e-5


class Kernels(NamedTuple):
    """How the parts of a layer are computed; fused.py has another way."""

    norm: Callable[[Tensor, Tensor], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    swiglu: Callable[[nn.Module, nn.Module, Tensor], Tensor]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as Llama's own code has it: in fp32, then back, then times the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)
    return y.type_as(x) * weight


def rotate(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with their places in them; see :func:`rotated`."""
    return rotated(q, angles), rotated(k, angles)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding, as Meta's Llama has it: neighbours are a complex number.

    Args:
        x: ``[batch, length, heads, size]``.
        angles: ``[length, 1, size / 2]``, complex.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


def swiglu(gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """The first half of a layer's MLP: two products, and one of them weighs the other."""
    out: Tensor = functional.silu(gate(x)) * up(x)
    return out


SEPARATE = Kernels(norm, rotate, swiglu)


class RmsNorm(nn.Module):
    """A norm with a weight for each feature."""

    kernels = SEPARATE

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self.weight)


class LlamaBlock(nn.Module):
    """A layer of Llama: RMSNorm, rotated queries and keys, SwiGLU, fewer keys than queries."""

    kernels = SEPARATE

    def __init__(self, width: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        size = width // heads
        self.norm, self.mlp_norm = RmsNorm(width), RmsNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys * size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.size = nn.Linear(hidden, width, bias=False), size

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).view(*y.shape[:2], -1, self.size) for part in (self.q, self.k, self.v))
        q, k = self.kernels.rotate(q, k, angles)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(self.kernels.swiglu(self.gate, self.up, y))
        return out


class Llama(nn.Module):
    """Llama 2 and 3. Tokens and targets as in :class:`Gpt`."""

    def __init__(
        self, width: int, layers: int, heads: int, keys: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.tokens, self.size = nn.Embedding(vocabulary, width), width // heads
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, keys, hidden) for _ in range(layers))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.loss = "whole"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        angles = torch.zeros(tokens.shape[1], 1, self.size // 2, dtype=torch.complex64)
        for block in self.blocks:
            x = block(x, angles)
        return logits_or_loss(self.head, self.norm(x), targets, self.loss)

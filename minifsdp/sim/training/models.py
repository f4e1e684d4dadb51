"""Models to run on a virtual cluster, and what a step of each is.

Sizes are those of the papers; the layers are the ordinary ones of torch, so that what is measured
is what a plain PyTorch program would do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Job:
    """A model, and how to train it.

    Attributes:
        build: makes the model; called where new tensors are virtual.
        blocks: classes of the modules to make units of.
        loss: of the model, the number of samples and their length.
        note: what to tell the user about it, if it was found out.
    """

    build: Callable[[], nn.Module]
    blocks: tuple[type[nn.Module], ...]
    loss: Callable[[nn.Module, int, int], Tensor]
    note: str = ""


class Attention(nn.Module):
    """Multi-head attention; to ``memory`` if that is given, else to itself."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.heads, self.causal = nn.Linear(width, width), heads, causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        k, v = self.kv(x if memory is None else memory).chunk(2, dim=-1)
        causal = self.causal and memory is None
        y = functional.scaled_dot_product_attention(
            split(self.q(x)), split(k), split(v), is_causal=causal
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A layer of a transformer; with ``cross``, one of a decoder that looks at an encoder."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool, cross: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads, False) if cross else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x))
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        out: Tensor = x + self.mlp(x)
        return out


class Gpt(nn.Module):
    """A decoder; or, with ``causal=False``, an encoder as RoBERTa is.

    Tokens ``[batch, length]`` in; logits ``[batch, length, vocabulary]`` out, or, with the tokens
    that they should say, the loss.
    """

    def __init__(
        self, width: int, layers: int, heads: int, vocabulary: int = 50304, causal: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(8192, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, causal, False) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = "whole"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return logits_or_loss(self.head, self.norm(x), targets, self.loss)


CHUNKS = 8


def logits_or_loss(head: nn.Module, x: Tensor, targets: Tensor | None, how: str) -> Tensor:
    """What a language model gives: logits, or with ``targets`` their mean cross-entropy.

    Logits are often the largest tensors of a step: a whole vocabulary for each token.

    Args:
        x: the last layer's, ``[batch, length, width]``.
        how: ``"whole"``: all logits, in fp32, and their gradient beside them. ``"fused"``: in the
            precision of the model, and the gradient in their place. ``"chunked"``: those of an
            eighth of the tokens at a time, which are computed again in the backward.
    """
    if targets is None:
        logits: Tensor = head(x)
        return logits

    def summed(x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(x).float(), targets, reduction="sum")

    x, targets = x.flatten(0, 1), targets.flatten()
    if how == "fused":
        total: Tensor = FusedCrossEntropy.apply(head(x), targets)  # type: ignore[no-untyped-call]
    elif how == "chunked":
        parts = zip(x.chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
        total = torch.stack(
            [checkpoint(summed, *part, use_reentrant=False) for part in parts]
        ).sum()
    else:
        total = summed(x, targets)
    return total / targets.numel()


class FusedCrossEntropy(torch.autograd.Function):
    """The sum over all tokens; the gradient is computed with it and overwrites the logits.

    Source: Hsu et al., "Liger Kernel", arXiv:2410.10989, and flash-attn's before it.
    On a GPU it is one kernel forward, here three.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, -1, out=logits)
        chosen = targets[:, None]
        loss = -probabilities.gather(1, chosen).float().log().sum()
        context.save_for_backward(
            probabilities.scatter_add_(1, chosen, -torch.ones_like(chosen, dtype=logits.dtype))
        )
        return loss

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits_grad,) = context.saved_tensors
        return logits_grad.mul_(grad), None


class T5(nn.Module):
    """An encoder and a decoder, with one embedding for both and for the output."""

    def __init__(
        self, width: int, layers: int, heads: int, hidden: int, vocabulary: int = 32128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, hidden, False, False) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(Block(width, heads, hidden, True, True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = "whole"

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        memory = self.tokens(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.tokens(tokens)
        for block in self.decoder:
            x = block(x, memory)
        return logits_or_loss(self.head, x, targets, self.loss)


class Vit(nn.Module):
    """A vision transformer. Patches ``[batch, length, 588]`` in, 1000 logits out."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Linear(588, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, False, False) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def next_token(model: nn.Module, batch: int, length: int) -> Tensor:
    """Cross-entropy of a language model on ``batch`` texts of ``length`` tokens."""
    tokens = torch.zeros(batch, length, dtype=torch.long)
    loss: Tensor = model(tokens, tokens)
    return loss


def classes(model: nn.Module, batch: int, length: int) -> Tensor:
    """Cross-entropy of a classifier on ``batch`` pictures of ``length`` patches."""
    logits = model(torch.zeros(batch, length, 588))
    return functional.cross_entropy(logits.float(), torch.zeros(batch, dtype=torch.long))

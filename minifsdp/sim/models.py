"""Models to run on a virtual cluster, and what a step of each is.

Sizes are those of the papers; the layers are the ordinary ones of torch, so that what is measured
is what a plain PyTorch program would do.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

    def __init__(self, width: int, heads: int, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width, bias), nn.Linear(width, 2 * width, bias)
        self.out, self.heads, self.causal = nn.Linear(width, width, bias), heads, causal

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

    def __init__(
        self, width: int, heads: int, hidden: int, causal: bool, cross: bool, bias: bool = True
    ) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads, causal, bias)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads, False) if cross else None
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, hidden, bias),
            nn.GELU(),
            nn.Linear(hidden, width, bias),
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
        self,
        width: int,
        layers: int,
        heads: int,
        vocabulary: int = 50304,
        causal: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(8192, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, causal, False, bias) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.chunks = 1

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return logits_or_loss(self.head, self.norm(x), targets, self.chunks)


def logits_or_loss(head: nn.Module, x: Tensor, targets: Tensor | None, chunks: int) -> Tensor:
    """What a language model gives: logits, or with ``targets`` their mean cross-entropy.

    Args:
        x: the last layer's, ``[batch, length, width]``.
        chunks: with more than one, logits are there for one chunk of the tokens at a time, and are
            computed again in the backward. They are often the largest tensors of a step: fp32, and
            a whole vocabulary for each token. Source: torchtune's ``CEWithChunkedOutputLoss``; Hsu
            et al., "Liger Kernel", arXiv:2410.10989.
    """
    if targets is None:
        logits: Tensor = head(x)
        return logits

    def summed(x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(head(x).float(), targets, reduction="sum")

    parts = list(zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True))
    if chunks == 1:
        return summed(*parts[0]) / targets.numel()
    losses = [checkpoint(summed, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / targets.numel()


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
        self.chunks = 1

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        memory = self.tokens(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self.tokens(tokens)
        for block in self.decoder:
            x = block(x, memory)
        return logits_or_loss(self.head, x, targets, self.chunks)


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

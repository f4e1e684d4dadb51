"""Models that `make bench` trains, each on the same random tokens for every contender."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutorials.train_gpt import GPT


@dataclass(frozen=True)
class Workload:
    """A GPT of ``train_gpt.py`` and what a rank gives it in a step.

    Attributes:
        tokens: batch and length.
        about: in words, for the report.
    """

    layers: int
    width: int
    vocab: int
    tokens: tuple[int, int]
    about: str

    def model(self) -> nn.Module:
        """The same on all ranks, and each time."""
        torch.manual_seed(0)
        return self._gpt()

    def batches(self, rank: int, device: torch.device) -> list[Tensor]:
        """Different ones on each rank, for as many steps, which are then repeated."""
        made = torch.Generator().manual_seed(rank)
        return [torch.randint(self.vocab, self.tokens, generator=made).to(device) for _ in range(4)]

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return _nbytes(self._on_meta())

    @property
    def block_nbytes(self) -> int:
        """Of the parameters of one block."""
        return _nbytes(self._on_meta().blocks[0])

    @property
    def shares_of_computing(self) -> tuple[float, float]:
        """One block's, and the head's, by the weights that are multiplied with."""
        model = self._on_meta()
        block, head = (_nbytes(part) for part in (model.blocks[0], model.head))
        whole = self.layers * block + head
        return block / whole, head / whole

    def _gpt(self) -> GPT:
        return GPT(self.layers, self.width, self.vocab, context=max(self.tokens[1], 64))

    def _on_meta(self) -> GPT:
        with torch.device("meta"):
            return self._gpt()


def _nbytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


WORKLOADS = {
    "comm": Workload(8, 512, 8192, (1, 32), "34 M parameters, 32 tokens: communication decides"),
    "comp": Workload(6, 384, 2048, (4, 128), "12 M parameters, 512 tokens: computation decides"),
    "125m": Workload(12, 768, 26_000, (1, 32), "125 M parameters, 32 tokens"),
    "350m": Workload(24, 1024, 24_000, (1, 32), "351 M parameters, 32 tokens"),
    "tiny": Workload(4, 128, 256, (16, 64), "that of `make demo`: 0.9 M parameters, 1,024 tokens"),
}

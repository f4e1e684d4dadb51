"""What page 14 measures of two places at which weights can be cast to bf16."""

import torch
from launch import on_ranks
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from train_gpt import CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy

BF16, SIZE = torch.bfloat16, {"layers": 4, "width": 128}


class CastWeights(TorchDispatchMode):
    """Knows which matrices a model has cast to bf16, and whether they are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype is BF16 and made.dim() == 2:
            self.made.append((StorageWeakRef(made.untyped_storage()), made.nbytes))
        return made

    def left(self) -> int:
        """Bytes of those that are there."""
        return sum(nbytes for storage, nbytes in self.made if not storage.expired())


@on_ranks(2)
def _forward(precision: MixedPrecision | None) -> tuple[int, int]:
    policy = ModuleWrapPolicy({Block})
    model = FSDP(GPT(**SIZE), auto_wrap_policy=policy, mixed_precision=precision)
    tokens = torch.randint(256, (1, CONTEXT))
    with CastWeights() as weights, torch.autocast("cpu", BF16, enabled=precision is None):
        loss = functional.cross_entropy(model(tokens)[0].float(), tokens[0])
    gathered, left = model.engine.stats.peak_unsharded_bytes, weights.left()
    loss.backward()
    assert weights.left() == 0
    return gathered, left


def weights_of_a_forward(ways: dict[str, MixedPrecision | None]) -> None:
    """Print how much of a GPT one forward has gathered at once, and how much of its weights it has
    left in memory for the backward.

    Args:
        ways: by their names; None is `torch.autocast`.
    """
    layers = (m for m in GPT(**SIZE).modules() if isinstance(m, nn.Linear))
    nbytes = sum(layer.weight.numel() for layer in layers) * BF16.itemsize
    print(f"all linear layers: {nbytes / 1e6:.1f} MB in bf16")
    for name, precision in ways.items():
        gathered, left = _forward(precision)[0]
        assert left == (nbytes if precision is None else 0)
        print(f"{name:15} {gathered / 1e6:.1f} MB gathered at once, {left / 1e6:.1f} MB left")

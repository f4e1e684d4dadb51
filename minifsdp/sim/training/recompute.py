"""Activation checkpointing: what of the forward is kept for the backward, and what is done again.

==========  ====================================================================================
none        everything is kept
full        of each block only its input; the rest is computed again
1/2         full, for every second block; or any other share
selective   every second matrix product, and attention; the rest, which is cheap or small, again
==========  ====================================================================================

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; selective
as in torchtitan (``torchtitan/distributed/activation_checkpoint.py``), after Korthikanti et al.,
arXiv:2205.05198; shares of blocks as in IBM's fms-fsdp.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from minifsdp.sim.cli.values import share_of

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
KEPT = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


def recompute(blocks: list[nn.Module], how: str) -> None:
    """Have blocks computed again in the backward.

    Args:
        blocks: in the order of the forward.
        how: as in the table above.

    Raises:
        ValueError: it is none of these.
    """
    share = share_of(how)
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = _contexts_that_keep_every_second_product
    for i, block in enumerate(blocks):
        if int((i + 1) * share) > int(i * share):
            again: Callable[..., Any] = block.forward
            block.forward = partial(checkpoint, again, use_reentrant=False, **contexts)


def _contexts_that_keep_every_second_product() -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in KEPT
        if operation in PRODUCTS:  # the same ones, forward and when it is done again
            counts[context.is_recompute] += 1
            keep = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

"""The model in FSDP, with the settings of the command line."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    ForwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.limiter import NoLimit
from minifsdp.sim.training.history import APPROACHES

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
BACKWARD = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
ENGINES = {"fsdp1": APPROACHES["PyTorch"], "fsdp2": APPROACHES["FSDP2"]}
FORWARD: dict[str, ForwardPrefetch | Literal[False]] = {
    "none": False,
    "pre": ForwardPrefetch.FORWARD_PRE,
    "post": ForwardPrefetch.FORWARD_POST,
}
PRECISION = {
    "fp32": None,
    "tf32": None,  # the same, in tf32()
    "bf16": MixedPrecision(torch.bfloat16),
    "bf16-fp32": MixedPrecision(torch.bfloat16, torch.float32),
}


@contextmanager
def tf32(precision: str) -> Iterator[None]:
    """Inside, products of numbers in 32 bits round their factors to TF32, if ``--precision`` says
    so, as with ``torch.set_float32_matmul_precision("high")``."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def wrapped(
    module: nn.Module, blocks: tuple[type[nn.Module], ...], options: argparse.Namespace
) -> FSDP:
    """``FSDP(module)``.

    Args:
        blocks: classes of the modules to make units of.
        options: as of :func:`minifsdp.sim.cli.options.add_settings`.
    """
    settings: dict[str, Any] = {
        "auto_wrap_policy": _units(module, blocks, options.unit),
        "sharding_strategy": STRATEGIES[options.strategy],
        "mixed_precision": PRECISION[options.precision],
        "cpu_offload": CPUOffload(options.offload == "yes"),
    }
    if options.shard_group is not None:
        settings["process_group"] = _groups(options.shard_group)
    backward, forward = BACKWARD[options.backward], FORWARD[options.forward]
    if options.engine != "minifsdp":
        approach = replace(ENGINES[options.engine], backward=backward, forward=forward or None)
        if options.limit == "none":
            approach = replace(approach, limiter=NoLimit)
        return approach.wrap(module, **settings)
    return FSDP(
        module,
        limit_all_gathers=limit_of(options.limit),
        backward_prefetch=backward,
        forward_prefetch=forward,
        **settings,
    )


def _units(
    module: nn.Module, blocks: tuple[type[nn.Module], ...], unit: str
) -> CustomPolicy | None:
    """The blocks; or also the large parts inside of them; or nothing but the whole model."""
    if unit == "model":
        return None
    chosen = {block for block in module.modules() if isinstance(block, blocks)}
    if unit == "part":
        for block in list(chosen):
            whole = sum(p.numel() for p in block.parameters())
            for part in block.children():
                if sum(p.numel() for p in part.parameters()) > whole / 5:
                    chosen.add(part)
    return CustomPolicy(lambda inner: inner in chosen)


def _groups(together: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Those of rank 0 in hybrid strategies: the ranks that share a model, and those that have the
    same part of it."""
    row, column = range(together), range(0, dist.get_world_size(), together)
    return dist.new_group(list(row)), dist.new_group(list(column))


def limit_of(given: str) -> bool | int:
    """What ``--limit`` means: the argument ``limit_all_gathers``."""
    return int(given) if given.isdecimal() else given == "true"

"""What scripts read of a wrapper besides its methods: torch's attributes, under torch's names.

torch's FSDP stores the arguments that it was given, and what came of them, as attributes. Scripts
read some of them: to put a batch where the model computes, to average a loss over the ranks that
share the model, or to print how it is sharded::

    batch.to(model.compute_device)
    dist.all_reduce(loss, group=model.process_group)

Here they are computed from the wrapper's own unit when they are read, so they cannot disagree with
what the engine does. A wrapped module's attribute of the same name comes first, since a wrapper
looks like the module that it wraps (attributes.py). It cannot be told from a script's, so a model
that has a ``rank`` of its own keeps it.

Source: ``_init_process_group_state`` and ``_init_core_state`` of torch.distributed.fsdp (pytorch
2.13).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minifsdp.api import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.comm.collectives import Group
from minifsdp.unit import Unit


def process_group(unit: Unit) -> Group:
    """The ranks that share the unit's parameters or, if each has them all, that average its
    gradient. Of hybrid strategies the group that shards, as in torch."""
    group = unit.shard_group or unit.replicate_group
    assert group is not None
    return group


def sharding_strategy(unit: Unit) -> ShardingStrategy:
    """The strategy that the unit follows now. A group of one rank keeps the strategy that was asked
    for; torch calls it NO_SHARD."""
    if unit.shard_group is None:
        return ShardingStrategy.NO_SHARD
    if unit.replicate_group is None:
        full, zero2 = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    else:
        full, zero2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    return full if unit.reshard_after_forward else zero2


def params(unit: Unit) -> list[nn.Parameter]:
    """What the optimizer sees of the unit: its sharded flat parameter or, in rows, a DTensor for
    each parameter. (torch has its flat parameter there in both cases.) Empty for a unit that has no
    parameters."""
    return unit.optimized_params if unit.numel else []


def cpu_offload(unit: Unit) -> CPUOffload:
    """Whether its shard lives on the host."""
    return CPUOffload(offload_params=unit.offload_from is not None)


def mixed_precision(unit: Unit) -> MixedPrecision:
    """The dtypes that it computes and reduces in. All fields are None where none were asked for."""
    return unit.precision


def compute_device(unit: Unit) -> torch.device:
    """Where it is computed with, which with offload is not where its shard is."""
    return unit.device


TORCH_ATTRIBUTES: dict[str, Callable[[Unit], Any]] = {
    "_flat_param": lambda unit: unit.sharded_flat_param if unit.numel else None,
    "_has_params": lambda unit: unit.numel > 0,
    "compute_device": compute_device,
    "cpu_offload": cpu_offload,
    "mixed_precision": mixed_precision,
    "params": params,
    "process_group": process_group,
    "rank": lambda unit: process_group(unit).rank(),
    "sharding_strategy": sharding_strategy,
    "world_size": lambda unit: process_group(unit).size(),
}
"""By name: what a wrapper of this unit answers. accelerate reads the two that begin with ``_``."""

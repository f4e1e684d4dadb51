"""What scripts read of a wrapper besides its methods: torch's attributes, under torch's names.

torch's FSDP stores the arguments that it was given, and what came of them, as attributes. Scripts
read some of them: to put a batch where the model computes, to average a loss over the ranks that
share the model, or to print how it is sharded::

    batch.to(model.compute_device)
    dist.all_reduce(loss, group=model.process_group)

Here they are computed from the wrapper's own unit, or from what its root shares among all units,
when they are read, so they cannot disagree with what the engine does. A wrapped module's attribute
of the same name comes first, since a wrapper looks like the module that it wraps (attributes.py):
a model that has a ``rank`` of its own keeps it.

Source: ``_init_process_group_state`` and ``_init_core_state`` of torch.distributed.fsdp (pytorch
2.13).
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState as TorchTrainingState

from minifsdp.api import CPUOffload
from minifsdp.core.api import ShardingStrategy
from minifsdp.core.collectives import Group
from minifsdp.core.limiter import NoLimit
from minifsdp.featured_unit import FeaturedUnit


def process_group(unit: FeaturedUnit) -> Group:
    """The ranks that share the unit's parameters or, if each has them all, that average its
    gradient. With hybrid strategies it is the group that shards, as in torch."""
    group = unit.shard_group or unit.replicate_group
    assert group is not None
    return group


def sharding_strategy(unit: FeaturedUnit) -> ShardingStrategy:
    """The strategy that the unit follows now. A group of one rank keeps the strategy that was asked
    for; torch calls it NO_SHARD."""
    if unit.shard_group is None:
        return ShardingStrategy.NO_SHARD
    if unit.replicate_group is None:
        full, zero2 = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    else:
        full, zero2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
    return full if unit.reshard_after_forward else zero2


class Handle:
    """What accelerate and verl use of torch's ``FlatParamHandle``. Any attribute can be set on it:
    accelerate notes here that it has cast ``flat_param``. The engine follows the cast by itself."""

    def __init__(self, unit: FeaturedUnit) -> None:
        self.flat_param = unit.sharded_flat_param

    def reshard(self, free_unsharded_flat_param: bool = True) -> None:
        """Does nothing: between steps all units are free."""


def params(unit: FeaturedUnit) -> list[nn.Parameter]:
    """What the optimizer sees of the unit: its sharded flat parameter or, in rows, a DTensor for
    each parameter. (torch has its flat parameter there in both cases.) Empty for a unit that has no
    parameters."""
    return unit.optimized_params if unit.numel else []


def limit_all_gathers(root: Any) -> bool:
    """Whether the number of units that are unsharded at once has a limit."""
    return not isinstance(root._engine.limiter, NoLimit)


def training_state(wrapper: Any) -> TorchTrainingState:
    """What the wrapper's root is doing, in torch's words: a forward or backward, or nothing; or
    that this unit's parameters have been summoned."""
    if wrapper._unit in wrapper._hooks.summoned:
        return TorchTrainingState.SUMMON_FULL_PARAMS
    idle = wrapper._hooks.idle
    return TorchTrainingState.IDLE if idle else TorchTrainingState.FORWARD_BACKWARD


TORCH_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "_flat_param": lambda w: w._unit.sharded_flat_param if w._unit.numel else None,
    "_handle": lambda w: Handle(w._unit) if w._unit.numel else None,
    "_has_params": lambda w: w._unit.numel > 0,
    "_is_root": lambda w: w.check_is_root(),
    "_use_orig_params": lambda w: w._unit.mesh is not None,
    "backward_prefetch": lambda w: w._engine.prefetcher.backward,
    "compute_device": lambda w: w._unit.device,
    "cpu_offload": lambda w: CPUOffload(w._unit.offload_from is not None),
    "forward_prefetch": lambda w: w._engine.prefetcher.forward is not None,
    "limit_all_gathers": limit_all_gathers,
    "mixed_precision": lambda w: w._unit.precision,
    "params": lambda w: params(w._unit),
    "process_group": lambda w: process_group(w._unit),
    "rank": lambda w: process_group(w._unit).rank(),
    "sharding_strategy": lambda w: sharding_strategy(w._unit),
    "training_state": training_state,
    "world_size": lambda w: process_group(w._unit).size(),
}
"""By name: what a wrapper answers. accelerate reads some of those that begin with ``_``."""

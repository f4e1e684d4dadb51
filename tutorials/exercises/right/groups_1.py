"""One case after the other, without Placement's order of arguments."""

from typing import Any

import torch.distributed as dist

from minifsdp.core.api import ShardingStrategy


def place(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> Placement:
    if type(strategy) is not ShardingStrategy:
        raise TypeError("not a strategy")
    if not dist.is_initialized():
        raise RuntimeError("init_process_group() first")
    groups = process_group
    if device_mesh is not None:
        groups = _mesh_groups(process_group, device_mesh)
    frees = strategy.name in ("FULL_SHARD", "HYBRID_SHARD")
    shard = replicate = None
    match strategy.name:
        case "HYBRID_SHARD" | "_HYBRID_SHARD_ZERO2":
            shard, replicate = _pair(groups)
        case "NO_SHARD":
            replicate = _single(strategy, groups)
        case _:
            shard = _single(strategy, groups)
    return Placement(reshard_after_forward=frees, shard_group=shard, replicate_group=replicate)

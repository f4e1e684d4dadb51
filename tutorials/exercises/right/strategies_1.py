"""Right: a table of what there is to do, and of what it depends on."""

from functools import reduce
from typing import Any

from minifsdp.core.reduce import ReduceScatter, Stage
from minifsdp.core.streams import Streams
from minifsdp.core.unshard import OwnShard
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.offload import Download, Upload
from minifsdp.precision import Cast, CastShard
from minifsdp.strategies import _all_reduce


def source_of(unit: FeaturedUnit) -> Any:
    sends = unit.shard_group is not None or unit.mixed is not None
    around = [Upload] * (unit.offload_from is not None)
    around += [CastShard] * (sends and unit.precision.param_dtype is not None)
    return reduce(lambda inner, kind: kind(inner), around, OwnShard(unit.shard_group))


def stages_of(unit: FeaturedUnit, streams: Streams) -> list[Stage]:
    stages: list[Stage] = []
    if unit.precision.reduce_dtype is not None:
        stages.append(Cast(unit.precision.reduce_dtype))
    if unit.comm_hook is not None:
        stages.append(unit.comm_hook)
    elif unit.shard_group is None:
        stages += _all_reduce("reduce", streams)
    else:
        stages.append(ReduceScatter())
        stages += _all_reduce("replicate", streams) if unit.replicate_group is not None else []
    if unit.offload_from is not None:
        stages.append(Download(streams))
    return stages

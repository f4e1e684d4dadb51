"""The strategies of a unit: what some units do in another way than others. Here it is chosen.

unshard.py asks ``unit.source`` what this rank sends in a gather::

    shard on the device                     OwnShard                         unshard.py
    shard on the host                       OwnShard --Upload-->             offload.py
    computed in low precision               OwnShard --CastShard-->          precision.py
    both                                    OwnShard --Upload--> --CastShard-->
    from forward to backward, if asked for  PostForwardShard                 post_forward.py

reduce.py has a gradient go through ``unit.stages``, in this order. (While gradients from no_sync
wait to be reduced, a stage that adds them comes before these; no_sync.py puts it there.) ::

    cast         to ``reduce_dtype``                        precision.py
    reduce       reduce-scatter in the shard group          reduce.py
                 all-reduce, if there is none (NO_SHARD)    reduce.py; on CPUs in halves.py
                 a user's communication hook                between_steps/comm_hooks.py
    replicate    all-reduce over replicas                   reduce.py; on CPUs in halves.py
    download     with offload                               offload.py

What a unit does not need is not there, so it is neither asked nor called.
"""

from minifsdp.comm.collectives import halves
from minifsdp.halves import FirstHalf, SecondHalf
from minifsdp.offload import Download, Upload
from minifsdp.precision import Cast, CastShard
from minifsdp.reduce import AllReduce, ReduceScatter, Stage
from minifsdp.streams import Streams
from minifsdp.unit import Unit
from minifsdp.unshard import OwnShard, Source


def source_of(unit: Unit) -> Source:
    """What a unit sends of its shard, from the inside outwards.

    Nothing that this depends on changes later: a model that is moved or cast has its shards
    elsewhere, which the sources look up; and with ``full_precision_in_eval`` the cast has nothing
    to do in an evaluation.
    """
    source: Source = OwnShard(unit.shard_group)
    if unit.offload_from is not None:
        source = Upload(source)
    # On the device, since a host casts slowly. A unit that is not sharded sends nothing: it copies
    # its shard, and copy_() casts on the way, without memory for a second copy.
    if unit.precision.param_dtype is not None and unit.shard_group is not None:
        source = CastShard(source)
    return source


def stages_of(unit: Unit, streams: Streams) -> list[Stage]:
    """The stages that a gradient of ``unit`` goes through, in their order. It depends on the unit's
    groups, precision, offload and hook, and on the device: ask again when one of them changes.

    Args:
        streams: of the device that the unit is computed on.
    """
    dtype, hook = unit.precision.reduce_dtype, unit.comm_hook
    cast: list[Stage] = [] if dtype is None else [Cast(dtype)]
    download: list[Stage] = [] if unit.offload_from is None else [Download(streams)]
    if hook is not None:  # it averages over the only group that there is
        return [*cast, hook, *download]
    if unit.shard_group is None:
        return [*cast, *_all_reduce("reduce", streams), *download]
    if unit.replicate_group is None:
        return [*cast, ReduceScatter(), *download]
    return [*cast, ReduceScatter(), *_all_reduce("replicate", streams), *download]


def _all_reduce(first: str, streams: Streams) -> list[Stage]:
    """``first``: the stream on which it begins."""
    if halves(streams.device) == 1:
        return [AllReduce(first)]
    return [FirstHalf(first), SecondHalf()]

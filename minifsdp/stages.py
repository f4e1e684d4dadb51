"""Which stages the reduction of a unit has: the one place that knows what there may be.

::

    cast         to ``reduce_dtype``                        precision.py
    reduce       reduce-scatter in the shard group          reduce.py
                 all-reduce, if there is none (NO_SHARD)    reduce.py; on CPUs in halves.py
                 a user's communication hook                between_steps/comm_hooks.py
    replicate    all-reduce over replicas                   reduce.py; on CPUs in halves.py
    download     with offload                               offload.py

A stage that a unit does not need is not in its list, and costs nothing.
"""

from minifsdp.comm.collectives import halves
from minifsdp.halves import FirstHalf, SecondHalf
from minifsdp.offload import Download
from minifsdp.precision import Cast
from minifsdp.reduce import AllReduce, ReduceScatter, Stage
from minifsdp.streams import Streams
from minifsdp.unit import Unit


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

"""The strategies of a unit: what is done in another way for some units than for others.

unshard.py asks ``unit.source`` what this rank sends in a gather, and knows no more of it::

    shard on the device                     OwnShard
    shard on the host                       OwnShard --Upload-->             offload.py
    computed in low precision               OwnShard --CastShard-->          precision.py
    both                                    OwnShard --Upload--> --CastShard-->
    from forward to backward, if asked for  PostForwardShard                 post_forward.py

What a unit does not need is not there, so it is neither asked nor called.
"""

from minifsdp.offload import Upload
from minifsdp.precision import CastShard
from minifsdp.unit import Unit
from minifsdp.unshard import OwnShard, Source


def choose_strategies(unit: Unit) -> None:
    """Set those of a new unit. Nothing that they depend on changes later: a model that is moved or
    cast has its shards elsewhere, which the sources look up; and with ``full_precision_in_eval``
    the cast has nothing to do in an evaluation."""
    unit.source = unit.own_source = source_of(unit)


def source_of(unit: Unit) -> Source:
    """What a unit sends of its shard, from the inside outwards."""
    source: Source = OwnShard(unit.shard_group)
    if unit.offload_from is not None:
        source = Upload(source)
    # On the device, since a host casts slowly. A unit that is not sharded sends nothing: it copies
    # its shard, and copy_() casts on the way, without memory for a second copy.
    if unit.precision.param_dtype is not None and unit.shard_group is not None:
        source = CastShard(source)
    return source

"""The first verb: gather a unit's parameters.

::

    shards     rank 0: A      rank 1: B      rank 2: C
    full       A B C          A B C          A B C          on every rank

In two halves, because what lies between them is the whole point: :func:`unshard` starts the
all-gather and returns at once, :func:`wait_for_unshard` makes the computation wait for it. Whatever
is computed in between hides the time that the network takes.
"""

from minifsdp.collectives import all_gather
from minifsdp.streams import Finish, Streams
from minifsdp.unit import Memory, Unit


def unshard(unit: Unit, streams: Streams) -> None:
    """Start gathering the parameters of a sharded unit, on the unshard stream.

    The caller has made the unshard stream wait for the optimizer's last step; without that wait the
    other ranks would be sent parameters of which some are a step old.
    """
    assert unit.memory is Memory.SHARDED and unit.shard_group is not None, unit.label
    group = unit.shard_group

    def launch() -> Finish:
        # Inside, so that on CUDA the memory is taken from the unshard stream's pool: the gather may
        # write to it at once, without waiting for whatever the compute stream is still doing.
        unit.resize_storage(unit.full_bytes)
        return all_gather(unit.buffer, unit.chunk, group, unit.tag)

    unit.memory = Memory.GATHERING  # even if the launch fails: there may be memory to free
    unit.gathered = streams.unshard.submit(launch)


def wait_for_unshard(unit: Unit) -> None:
    """Make the compute stream wait for the parameters; nothing, if they are there already."""
    if unit.memory is Memory.GATHERING:
        assert unit.gathered is not None
        # Without this wait the layers would compute with whatever was in that memory before.
        unit.gathered.wait()
        unit.gathered, unit.memory = None, Memory.UNSHARDED

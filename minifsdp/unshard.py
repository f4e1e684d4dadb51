"""The first verb: gather a unit's parameters.

::

    shards     rank 0: A      rank 1: B      rank 2: C
    full       A B C          A B C          A B C          on every rank

In two halves, because what lies between them is the whole point: :func:`unshard` starts the
all-gather and returns at once, :func:`wait_for_unshard` makes the computation wait for it. Whatever
is computed in between hides the time that the network takes.

On its way a chunk may have to be uploaded (offload.py) and cast (precision.py). A unit that is not
sharded has nothing to gather, but may still need the one or the other.
"""

from minifsdp.comm.collectives import all_gather
from minifsdp.offload import upload
from minifsdp.streams import Finish, Streams
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState


def unshard(unit: Unit, streams: Streams) -> None:
    """Start filling ``unit.unsharded.flat_param``, on the unshard stream.

    The caller has made the unshard stream wait for the optimizer's last step; without that wait the
    other ranks would be sent parameters of which some are a step old.
    """
    assert unit.needs_unshard, unit.label
    unit.state.start_unshard()  # first: if one of these fails, there may be memory to free
    offloaded = unit.offload_from is not None
    uploaded = upload(unit.padded_shard, streams, unit.label) if offloaded else None

    def launch() -> Finish:
        # Inside, so that on CUDA the memory is taken from the unshard stream's pool: the gather may
        # write to it at once, without waiting for whatever the compute stream is still doing.
        unit.unsharded.allocate()
        chunk = uploaded() if uploaded is not None else unit.padded_shard
        if unit.shard_group is not None:
            sent = chunk if chunk.dtype is unit.unsharded.dtype else chunk.to(unit.unsharded.dtype)
            return all_gather(unit.unsharded.data, sent, unit.shard_group, unit.tag, unit.label)
        unit.unsharded.data.copy_(chunk)  # casts as well
        return lambda: None

    unit.unshard_event = streams.unshard.submit(launch, f"all-gather {unit.label}")


def wait_for_unshard(unit: Unit) -> None:
    """Make the compute stream wait for the parameters; nothing, if they are there already."""
    if unit.state.sharded is ShardedState.UNSHARDING:
        assert unit.unshard_event is not None
        # Without this wait the layers would compute with whatever was in that memory before.
        unit.unshard_event.wait()
        unit.unshard_event = None
        unit.state.finish_unshard()

"""Unshard: gather the shards of a unit from all ranks.

::

    sharded flat parameter      rank 0: A      rank 1: B      rank 2: C
    unsharded flat parameter    A B C          A B C          A B C       on every rank

There are two functions, because of what can happen between them. :func:`unshard` starts the
all-gather and returns at once; :func:`wait_for_unshard` makes the computation wait for it. The
computation in between hides the time that the network takes.

A shard may have to be uploaded (offload.py) and cast (precision.py) first. A unit that is not
sharded needs no all-gather, but may need these.
"""

from minifsdp.comm.collectives import all_gather
from minifsdp.offload import upload
from minifsdp.streams import Finish, Streams
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState


def unshard(unit: Unit, streams: Streams) -> None:
    """Start to fill ``unit.unsharded.flat_param``, ``[padded_numel]``, on the unshard stream.

    The unit is SHARDED before this, and UNSHARDING after it. Before this, make the unshard stream
    wait for the optimizer's last step. Otherwise the other ranks may get parameters of which some
    are from before that step.
    """
    assert unit.needs_unshard, unit.label
    unit.state.start_unshard()  # first, so that reshard() frees the memory if one of these fails
    offloaded = unit.offload_from is not None
    uploaded = upload(unit.padded_shard, streams, unit.label) if offloaded else None

    def launch() -> Finish:
        # Allocated in here, so that on CUDA the memory belongs to the unshard stream. The
        # all-gather can then write to it without waiting for the compute stream.
        unit.unsharded.allocate()
        shard = uploaded() if uploaded is not None else unit.padded_shard
        if unit.shard_group is not None:
            sent = shard if shard.dtype is unit.unsharded.dtype else shard.to(unit.unsharded.dtype)
            full, blocks = unit.unsharded.data, unit.layout.blocks
            return all_gather(full, sent, unit.shard_group, unit.tag, unit.label, blocks=blocks)
        unit.unsharded.data.copy_(shard)  # casts as well
        return lambda: None

    unit.unshard_event = streams.unshard.submit(launch, f"all-gather {unit.label}")


def wait_for_unshard(unit: Unit) -> None:
    """Make the compute stream wait for the parameters.

    A unit that was UNSHARDING is UNSHARDED after this. Units in other states stay as they are.
    """
    if unit.state.sharded is ShardedState.UNSHARDING:
        assert unit.unshard_event is not None
        # Without this wait the layers would compute with the old contents of that memory.
        unit.unshard_event.wait()
        unit.unshard_event = None
        unit.state.finish_unshard()

"""The second verb: let a unit's full parameters go.

Freeing is the easy half of sharding and the one that is easy to get wrong. Dropping the tensor
frees nothing: autograd's saved views keep its *storage* alive. So the storage itself is resized to
nothing, under everybody's eyes, and whoever touches a view before the next unshard is in error.
"""

from minifsdp.streams import Event, Streams
from minifsdp.support.param_views import use_sharded_views
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState


def reshard(unit: Unit, streams: Streams) -> Event:
    """Free the full parameters of a gathered unit.

    Returns:
        An event on the compute stream: once it is passed, nothing reads the freed memory any more.
        The host frees long before a GPU gets there; the limiter is about this difference.
    """
    assert unit.state.sharded is not ShardedState.SHARDED, unit.label
    use_sharded_views(unit)
    if unit.unshard_event is not None:
        # Prefetched and never used. The gather still writes to this memory.
        unit.unshard_event.wait()
        unit.unshard_event = None
    # The memory belongs to the unshard stream and was read on the compute stream.
    streams.compute.record_stream(unit.unsharded.data)
    unit.release()
    unit.state.reshard()
    return streams.compute.record_event()

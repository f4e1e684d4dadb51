"""The second verb: let a unit's full parameters go.

Freeing is the easy half of sharding and the one that is easy to get wrong. Dropping the tensor
frees nothing: autograd's saved views keep its *storage* alive. So the storage itself is resized to
nothing, under everybody's eyes, and whoever touches a view before the next unshard is in error.
"""

from minifsdp.streams import Event, Streams
from minifsdp.support.param_views import hide
from minifsdp.unit import Memory, Unit


def reshard(unit: Unit, streams: Streams) -> Event:
    """Free the full parameters of a gathered unit.

    Returns:
        An event on the compute stream: once it is passed, nothing reads the freed memory any more.
        The host frees long before a GPU gets there; the limiter is about this difference.
    """
    assert unit.memory is not Memory.SHARDED, unit.label
    hide(unit)
    if unit.gathered is not None:
        # Prefetched and never used. The gather still writes to this memory.
        unit.gathered.wait()
        unit.gathered = None
    # The memory belongs to the unshard stream and was read on the compute stream.
    streams.compute.record_use(unit.buffer)
    unit.release()
    unit.memory = Memory.SHARDED
    return streams.compute.record_event()

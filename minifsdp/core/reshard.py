"""Reshard: free a unit's unsharded flat parameter, and keep only this rank's shard.

::

    unsharded flat parameter    A B C          A B C          A B C       on every rank
    sharded flat parameter      rank 0: A      rank 1: B      rank 2: C

To delete the tensor would free nothing: the views that autograd has saved keep its *storage* alive.
So the storage is resized to zero bytes, while the tensor and its views stay. A program that reads a
view before the next unshard makes an error.
"""

from .streams import Event, Streams
from .unit import Unit
from .unit_state import ShardedState
from .views import hide_views


def reshard(unit: Unit, streams: Streams) -> Event:
    """Free the unsharded flat parameter. The unit is UNSHARDING or UNSHARDED before this, and
    SHARDED after it.

    Returns:
        An event on the compute stream. When it is passed, nothing reads the freed memory any more.
        On a GPU this may be long after this function has returned, which is why there is a limiter
        (limiter.py).
    """
    assert unit.state.sharded is not ShardedState.SHARDED, unit.label
    hide_views(unit)
    if unit.unshard_event is not None:
        # The unit was prefetched and not used. Without this wait the all-gather could write to
        # memory that is already in use for something else.
        unit.unshard_event.wait()
        unit.unshard_event = None
    # The memory was allocated on the unshard stream and is read on the compute stream. Without this
    # line the next all-gather could overwrite it while a layer still reads it.
    streams.compute.record_stream(unit.unsharded.data)
    unit.release()
    unit.state.reshard()
    return streams.compute.record_event()

"""reshard.py, in another order: the event first, the views last."""

from minifsdp.core import views
from minifsdp.core.streams import Event, Streams
from minifsdp.core.unit import Unit


def reshard(unit: Unit, streams: Streams) -> Event:
    gather, unit.unshard_event = unit.unshard_event, None
    if gather is not None:
        gather.wait()
    unit.state.reshard()
    # What reads the memory has been launched by now; that the host frees it launches nothing.
    last_use = streams.compute.record_event()
    streams.compute.record_stream(unit.unsharded.data)
    views.hide_views(unit)
    unit.release()
    return last_use

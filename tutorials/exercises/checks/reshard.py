"""Checks of reshard.py: one unit alone, and a virtual GPU."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most, refused


def _free(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "UnitState" in got.get("message", ""):
        return "unit.state.reshard() says that the memory is gone"
    if "bytes that are left" in what:
        return (
            "deleting a tensor frees nothing: views keep the storage, so it is resized to nothing"
        )
    if "same tensor" in what:
        return "the tensor stays, because views that autograd has saved are of it"
    if "uses a parameter" in what:
        return "put placeholders in the places of the views: hide_views(unit)"
    if "while its all-gather" in what:
        return "an all-gather in progress still writes to the memory: wait for unit.unshard_event"
    if "who waits" in what and "the host" in str(got):
        return "let the compute stream wait for unit.unshard_event: event.wait(), not synchronize()"
    if "who waits" in what:
        return "an all-gather in progress still writes to the memory: wait for unit.unshard_event"
    if "event is kept" in what:
        return "forget unit.unshard_event, or it would be waited for once more"
    if "state" in what:
        return "unit.state.reshard() says that the memory is gone"
    if "passed" in what:
        return "return an event of the compute stream, recorded now that all uses are launched"
    if "races" in what:
        return (
            "the memory was allocated on the unshard stream and is read on the compute stream, so "
            "the allocator has to be told: streams.compute.record_stream(unit.unsharded.data)"
        )
    if "reserved" in what or "alive" in what:
        return "memory grows: the memory of a unit is not given back, or its event comes too early"
    return None


@check("reshard.1", because=_free)
def one_unit_alone() -> Iterator[Any]:
    import torch

    from minifsdp.core.reshard import reshard
    from minifsdp.core.streams import CpuEvent
    from minifsdp.core.views import show_views
    from tests.lone_unit import lone_unit

    with lone_unit() as lone:
        lone.fill()
        show_views(lone.unit)
        before = lone.unit.unsharded.flat_param
        reshard(lone.unit, lone.streams)
        yield "bytes that are left", lone.memory
        yield "flat_param is the same tensor as before", lone.unit.unsharded.flat_param is before
        yield "state of the unit", lone.unit.state.sharded
        use = refused(lambda: torch.add(lone.module.weight, 1))
        yield "exception where a module uses a parameter then", use
    with lone_unit() as lone:  # prefetched and not used
        lone.unit.state.start_unshard()
        lone.unit.unsharded.allocate()
        memory: list[int] = []
        lone.unit.unshard_event = CpuEvent(lambda: memory.append(lone.memory))
        reshard(lone.unit, lone.streams)
        yield "bytes that were there while its all-gather was in progress", memory
        yield "event is kept", lone.unit.unshard_event is not None
        yield "bytes that are left of a unit that was not used", lone.memory


@check("reshard.1", because=_free)
def the_host_does_not_wait_for_an_unused_gather() -> Iterator[Any]:
    from minifsdp.core.reshard import reshard
    from tests.lone_unit import lone_unit

    class Gather:
        """The event of a gather, which notes who waits."""

        def query(self) -> bool:
            return False

        def wait(self) -> None:
            waits.append("the compute stream")

        def synchronize(self) -> None:
            waits.append("the host")

    waits: list[str] = []
    with lone_unit() as lone:
        lone.unit.state.start_unshard()
        lone.unit.unsharded.allocate()
        lone.unit.unshard_event = Gather()
        reshard(lone.unit, lone.streams)
        yield "who waits for a gather that was not used", waits


@check("reshard.1", because=_free)
def the_event_is_of_the_compute_stream() -> Iterator[Any]:
    from dataclasses import replace

    from minifsdp.core.reshard import reshard
    from tests.lagging import LateStream
    from tests.lone_unit import lone_unit

    with lone_unit() as lone:
        lone.fill()
        compute = LateStream()
        done = reshard(lone.unit, replace(lone.streams, compute=compute))
        yield "passed before the device has done anything", done is None or done.query()
        compute.record_event().synchronize()
        yield "passed when the device has done all that was launched", done and done.query()


@check("reshard.1", because=_free)
def on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    gpu = train(limit_all_gathers=2)
    yield "races in a training step", [str(race) for race in gpu.races()][:1]
    yield at_most("units alive", gpu.report()["peak unsharded units"])
    yield at_most("reserved bytes", gpu.report()["peak reserved"], slack=0.02)

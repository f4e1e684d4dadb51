"""Checks of offload.py: copies on a CPU, a virtual GPU that finds missing waits, and two ranks."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _because(what: str, want: Any, got: Any) -> str | None:
    race = str(got[0]) if isinstance(got, list) and got else ""
    if "missing waits" in what and "given out again" in race:
        if "upload" in race or "unshard" in race:
            return (
                "the allocator has to know that the unshard stream uses the copy, too: "
                "streams.unshard.record_stream()"
            )
        return (
            "the allocator has to know that the download stream uses the tensor, too: "
            "streams.download.record_stream()"
        )
    if "when the host reads" in what and race:
        return "the event has to be that of the copy, on the stream that makes it"
    if "missing waits" in what and "download" in race:
        return (
            "the copy has to wait until the tensor has its values: make its stream wait for ready"
        )
    if "missing waits" in what and race:
        return "the unshard stream has to wait for the upload before the all-gather sends the copy"
    if "passed" in what:
        return "the event has to be that of the copy, on the stream that makes it"
    if "before the device" in what:
        return "the event has to be that of the copy, on the stream that makes it"
    if "host is in" in what:
        return "the host does not wait for a copy, nor for what comes before it: streams do"
    if "streams that copy" in what or "seconds" in what:
        return (
            "copies have streams of their own, upload and download: on another one they would hold "
            "up what else it has to do"
        )
    if "device" in what:
        return "the copy is on the other side: an upload on streams.device, a download on the host"
    if "allocated" in what:
        return "the memory of copies is not given back"
    return None


def _with_shard(shard: torch.Tensor) -> tuple[Any, Any]:
    """What an upload knows of a unit with this shard, and the upload."""
    from minifsdp.core.unshard import OwnShard
    from minifsdp.offload import Upload

    return SimpleNamespace(padded_shard=shard, label="'a'"), Upload(OwnShard(None))


@check("offload.1", because=_because)
def a_shard_is_uploaded() -> Iterator[Any]:
    from minifsdp.core.streams import Streams

    streams = Streams.on(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        unit, source = _with_shard(torch.rand(4).to(dtype))
        arrived: list[Any] = []
        source.prepare(unit, streams)

        def launch(unit: Any = unit, source: Any = source, arrived: Any = arrived) -> Any:
            arrived.append(source.tensor(unit, streams))
            return lambda: None

        streams.unshard.submit(launch, "all-gather").wait()
        yield f"what the unshard stream gets of a shard in {dtype}", arrived[0].clone()
        copy = weakref.ref(arrived.pop())
        # On a CPU to() gives the shard itself.
        kept = copy() is not None and copy() is not unit.padded_shard
        yield "whether a copy is allocated when it has been sent", kept


@check("offload.1", because=_because)
def uploads_on_a_gpu() -> Iterator[Any]:
    from minifsdp import CPUOffload
    from minifsdp.sim import cluster
    from minifsdp.sim.streams import make_streams
    from minifsdp.sim.tape import Op
    from tutorials.exercises.virtual import train

    with cluster() as gpu:
        streams = make_streams(gpu, torch.device("meta"))
        unit, source = _with_shard(torch.empty(50_000_000, device="cpu"))
        before, start = gpu.clock.now, len(gpu.tape)
        source.prepare(unit, streams)
        yield at_most("seconds that the host is in prepare()", gpu.clock.now - before, slack=1)
        with gpu.on("unshard"):
            yield "the device of the copy", source.tensor(unit, streams).device
        yield "streams that copy", sorted({e.stream for e in gpu.tape[start:] if isinstance(e, Op)})
    gpu = train(cpu_offload=CPUOffload(True))
    yield "missing waits, as the GPU finds them", [str(race) for race in gpu.races()[:1]]
    figures = gpu.report()
    yield at_most("seconds of a step", figures["step"], slack=0.02)
    yield at_most("allocated bytes of a step", figures["peak allocated"], slack=0.1)


@check("offload.1", ranks=2, because=_because)
def parameters_on_the_host_of_two_ranks() -> Iterator[Any]:
    yield from _on_two_ranks()


def _on_two_ranks() -> Iterator[Any]:
    from minifsdp import CPUOffload
    from tutorials.exercises.exact import train, wrapped

    for pattern in ("s", "ss"):
        model = wrapped(cpu_offload=CPUOffload(True))
        of = (
            "of two backwards for each step" if pattern == "ss" else "of one backward for each step"
        )
        yield f"losses {of}", train(model, pattern, steps=3)
        yield f"parameters {of}", model.state_dict()


def _downloaded(what: str, want: Any, got: Any) -> str | None:
    if "the same memory" in what:
        return "the copy goes to memory of its own, which the host has"
    return _because(what, want, got)


@check("offload.2", because=_downloaded)
def a_gradient_is_downloaded() -> Iterator[Any]:
    from minifsdp.core.streams import Streams
    from minifsdp.offload import Download

    streams = Streams.on(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.rand(2, 3).to(dtype)
        copy, finish = Download(streams).launch(None, source)
        finish()
        yield f"the copy of a tensor in {dtype}", copy
        yield "whether it is in the same memory", copy.data_ptr() == source.data_ptr()


@check("offload.2", because=_downloaded)
def downloads_on_a_gpu() -> Iterator[Any]:
    from minifsdp import CPUOffload
    from minifsdp.offload import Download
    from minifsdp.sim import cluster
    from minifsdp.sim.streams import make_streams
    from minifsdp.sim.tape import Op
    from tutorials.exercises.virtual import train

    with cluster() as gpu:
        streams = make_streams(gpu, torch.device("meta"))
        source, copies = torch.empty(50_000_000), []
        with gpu.on("reduce"):
            source.fill_(1)

        def launch() -> Any:
            copy, finish = Download(streams).launch(None, source)
            copies.append(copy)
            return finish

        streams.download.wait_event(streams.reduce.record_event())
        before, start = gpu.clock.now, len(gpu.tape)
        arrived = streams.download.submit(launch, "download")
        (copy,) = copies
        yield at_most("seconds that the host is in launch()", gpu.clock.now - before, slack=1)
        yield "streams that copy", sorted({e.stream for e in gpu.tape[start:] if isinstance(e, Op)})
        yield "the device of the copy", copy.device
        yield "whether the copy is complete before the device has made it", arrived.query()
        arrived.synchronize()
        yield "whether the event is passed when the host has waited for it", arrived.query()
        copy.sum()  # by the host
    yield "missing waits when the host reads it then", [str(race) for race in gpu.races()[:1]]
    gpu = train(cpu_offload=CPUOffload(True))
    yield "missing waits, as the GPU finds them", [str(race) for race in gpu.races()[:1]]
    figures = gpu.report()
    yield at_most("seconds of a step", figures["step"], slack=0.02)
    yield at_most("allocated bytes of a step", figures["peak allocated"], slack=0.1)


@check("offload.2", ranks=2, because=_downloaded)
def gradients_on_the_host_of_two_ranks() -> Iterator[Any]:
    yield from _on_two_ranks()

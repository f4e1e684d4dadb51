"""Checks of streams.py: with functions that note when they run, and on two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import refused


def _cpu(what: str, want: Any, got: Any) -> str | None:
    if what.startswith("after submit") and isinstance(got, list):
        if "finish" in got:
            return "submit waits for the work, so that nothing can be computed meanwhile"
        if "launch" not in got:
            return "launch has to run at once: ranks have to start collectives in the same order"
    if "kept after" in what:
        return "an event that still has its finish keeps all that finish has used: gradients, say"
    if "second wait" in what or "failed" in what:
        return (
            "each finish runs once: an event has to forget it before it calls it, so that nobody "
            "waits again for a collective that failed"
        )
    if "query()" in what:
        if isinstance(got, list):
            return "looking (query()) neither starts nor finishes work"
        return "an event is passed when its finish has run, and not before"
    if "another stream waits" in what:
        return (
            "what wait_event() is for is to make later work wait for the event of the other stream"
        )
    if "memory" in what or "parameters" in what or "loss" in what or "gradient" in what:
        return "what a collective brings is used before it is there, because a finish has not run"
    return None


def _work(log: list[str], name: str = "") -> Callable[[], Callable[[], None]]:
    def launch() -> Callable[[], None]:
        log.append("launch" + name)
        return lambda: log.append("finish" + name)

    return launch


@check("streams.1", because=_cpu)
def work_is_started_at_once_and_finished_at_the_first_wait() -> Iterator[Any]:
    from minifsdp.core.streams import CpuStream

    for wait in ("wait", "synchronize"):
        log: list[str] = []
        event = CpuStream().submit(_work(log), label="all-gather 'a'")
        yield "after submit, what has run", list(log)
        yield "query() of its event", event.query()
        yield "what has run after query()", list(log)
        getattr(event, wait)()
        yield f"after {wait}(), what has run", list(log)
        yield f"query() after {wait}()", event.query()
        event.wait()
        event.synchronize()
        yield f"after a second wait (the first was {wait}())", list(log)


@check("streams.1", because=_cpu)
def work_that_fails_is_not_waited_for_again() -> Iterator[Any]:
    from minifsdp.core.streams import CpuStream

    calls: list[str] = []

    def finish() -> None:
        calls.append("finish")
        raise ConnectionError("the other rank is gone")

    event = CpuStream().submit(lambda: finish)
    yield "the first wait for work that has failed", refused(event.wait)
    refused(event.synchronize)
    refused(event.wait)
    yield "how often finish has run after three waits for work that has failed", calls


@check("streams.1", because=_cpu)
def work_that_is_done_is_forgotten() -> Iterator[Any]:
    from weakref import ref

    from minifsdp.core.streams import CpuStream

    class Sent:
        """What is being sent, which a finish has to keep till then."""

    def launch() -> Callable[[], object]:
        sent.append(ref(gradient := Sent()))
        return lambda: [gradient].clear()

    sent: list[Callable[[], object]] = []
    event = CpuStream().submit(launch)
    event.wait()
    yield "what finish has used is kept after the wait", sent[0]() is not None


@check("streams.1", because=_cpu)
def one_stream_waits_for_another() -> Iterator[Any]:
    import torch

    from minifsdp.core.streams import CpuStream

    log: list[str] = []
    upload, unshard = CpuStream(), CpuStream()
    uploaded = upload.submit(_work(log, " upload"))
    unshard.wait_event(uploaded)
    unshard.submit(_work(log, " gather")).wait()
    uploaded.wait()
    yield "what has run where another stream waits for an upload", list(log)
    computed = CpuStream().record_event()
    unshard.wait_event(computed)
    computed.wait()
    yield "query() of a recorded event after it was waited for", computed.query()
    yield "record_stream of a tensor", unshard.record_stream(torch.zeros(2))


@check("streams.1", because=_cpu)
def a_unit_is_gathered() -> Iterator[Any]:
    from minifsdp.core.unshard import unshard, wait_for_unshard
    from tests.lone_unit import lone_unit

    with lone_unit() as lone:
        unshard(lone.unit, lone.streams)
        yield "the state of a unit while it is gathered", lone.unit.state.sharded.name
        wait_for_unshard(lone.unit)
        yield "the memory of a unit that was gathered", lone.gathered


@check("streams.1", ranks=2, because=_cpu)
def two_ranks_train() -> Iterator[Any]:
    from minifsdp import CPUOffload
    from tutorials.exercises.watching import stack, trained, wrapped

    yield from trained(wrapped(stack()))
    yield from trained(wrapped(stack(2), cpu_offload=CPUOffload(True)), steps=2)

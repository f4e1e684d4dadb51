"""Checks of gradients.py: one unit without other ranks, a virtual GPU, and two ranks."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import ratio
from tutorials.exercises.observe import at_least, at_most, refused


def _units(stack: ExitStack, names: str, **settings: Any) -> tuple[list[Any], Any]:
    """Lone units of these names, and the streams of the first."""
    from tests.lone_unit import lone_unit

    lone = [stack.enter_context(lone_unit(**settings)) for _ in names]
    for one, name in zip(lone, names, strict=True):
        one.unit.rename(name)
    return [one.unit for one in lone], lone[0].streams


def _watched(streams: Any, log: list[str], fails: str = "", times: int = 1) -> Any:
    """The same streams. What is started on two of them, and what is waited for, is noted."""
    from minifsdp.core.streams import CpuEvent, CpuStream

    class Watched(CpuStream):
        def submit(self, launch: Any, label: str = "") -> Any:
            log.append(f"start {label}")
            finish = launch()

            def end() -> None:
                log.append(f"wait for {label}")
                if label == fails and log.count(f"wait for {label}") == times:
                    raise ConnectionError("the network is gone")
                finish()

            return CpuEvent(end)

    return replace(streams, reduce=Watched(), replicate=Watched())


def _under_way(log: list[str]) -> int:
    """First parts that were started and not waited for."""
    return sum({"start reduce": 1, "wait for reduce": -1}.get(e.rsplit(" ", 1)[0], 0) for e in log)


def _grad() -> torch.Tensor:
    return torch.randint(1, 9, (10,)).float()


def _reduce(what: str, want: Any, got: Any) -> str | None:
    if "under way when the next" in what:
        return "wait for the first stage of the reduction before, so that at most one is under way"
    if "under way when take" in what:
        return "take() waits for the reduction that it starts, so that nothing hides it"
    if "parts of reductions" in what:
        return (
            "with replicas a reduction has further stages: when a reduction starts, each of those "
            "that are under way goes one stage further"
        )
    if "order of waits" in what:
        return (
            "the newest reduction goes on first. Ranks that replicate each other may have units in "
            "another order: with the oldest first, each would wait for a stage that the other one "
            "starts only after it"
        )
    if "two parts" in what:
        return "a second part is reduced as the first one is; store_gradient() adds them up"
    if "allocated" in what:
        return "gradients pile up: with no wait for the reduction before, all of them are in memory"
    if "seconds" in what:
        return "the backward waits for the network: only the reduction before has to be waited for"
    return None


@check("gradients.1", because=_reduce)
def a_gradient_is_reduced() -> Iterator[Any]:
    from minifsdp.core.gradients import Gradients

    with ExitStack() as stack:
        (a, b), streams = _units(stack, "ab")
        gradients = Gradients(streams)
        gradients.take(a, _grad())
        gradients.finish()
        yield "the gradient of a", a.sharded_flat_param.grad
        gradients.take(b, _grad())
        gradients.take(b, _grad())
        gradients.finish()
        yield "the gradient of b, which came in two parts", b.sharded_flat_param.grad


@check("gradients.1", because=_reduce)
def one_reduction_at_a_time() -> Iterator[Any]:
    from minifsdp.core.gradients import Gradients

    with ExitStack() as stack:
        units, streams = _units(stack, "abc")
        log: list[str] = []
        gradients = Gradients(_watched(streams, log))
        for unit in units:
            gradients.take(unit, _grad())
            before = log[: log.index(f"start reduce {unit.label}")]
            yield at_most(
                f"reductions under way when the next, {unit.name}, starts", _under_way(before)
            )
            yield at_least(f"reductions under way when take({unit.name}) returns", _under_way(log))
        gradients.finish()
        for unit in units:
            yield (
                f"the gradient of {unit.name} after three reductions",
                unit.sharded_flat_param.grad,
            )
    with ExitStack() as stack:
        units, streams = _units(stack, "abc", replicas=2)
        log = []
        gradients = Gradients(_watched(streams, log))
        for unit in units:
            gradients.take(unit, _grad())
        parts = sum(entry.startswith("start") for entry in log)
        yield at_least("parts of reductions that start during a backward with replicas", parts)
        waits = [entry for entry in log if entry.startswith("wait")]
        yield "the order of waits during a backward with replicas", waits
        gradients.finish()
        for unit in units:
            yield f"the gradient of {unit.name}, with replicas", unit.sharded_flat_param.grad


@check("gradients.1", because=_reduce)
def reductions_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    gpu = train(hardware={"network": 5e9})
    figures = gpu.report()
    yield at_most("allocated bytes, with a slow network", figures["peak allocated"], slack=0.02)
    yield "missing waits", [str(race) for race in gpu.races()[:1]]
    yield at_most("seconds of a step", train(rows=32768).report()["step"], slack=0.02)


@check("gradients.1", ranks=2, because=_reduce)
def accumulated_on_two_ranks() -> Iterator[Any]:
    from tutorials.exercises.exact import train, wrapped

    for pattern in ("s", "ws", "sws"):
        model = wrapped()
        of = "with a part of the gradients in no_sync" if "w" in pattern else "of plain training"
        yield f"losses {of}", train(model, pattern, steps=3)
        yield f"parameters {of}", model.state_dict()


def _finish(what: str, want: Any, got: Any) -> str | None:
    if "changed by a backward that fails" in what:
        return (
            "wait for all reductions first, then store: here some gradients are stored before a "
            "later reduction has failed"
        )
    if "drop() waits" in what:
        return (
            "keep the reductions till all are waited for: if one fails, drop() has to wait for "
            "those that are still being sent, whose memory would be given away"
        )
    if "are returned" in what:
        return "the reductions are returned, in the order in which they were started"
    if "pending" in what or "second backward" in what:
        return "when all is handed over, nothing of this backward may be left for the next one"
    if "with replicas" in what or ("raises if the last" in what and got != "ConnectionError"):
        return (
            "the last reduction has stages that are not started or not waited for: no further "
            "take() will do that"
        )
    if "missing waits" in what:
        return "the last part of each reduction has to be waited for before its result is read"
    if isinstance(want, torch.Tensor) and got is None:
        return "the result of the reduction was not stored"
    if (factor := ratio(want, got)) is not None:
        return f"it is {factor:g} x what it should be: is it stored more than once?"
    return None


@check("gradients.2", because=_finish)
def all_or_none() -> Iterator[Any]:
    from minifsdp.core.gradients import Gradients
    from tutorials.exercises.watching import pending

    with ExitStack() as stack:
        (a, b, c, d), streams = _units(stack, "abcd")
        gradients = Gradients(_watched(streams, []))
        for unit in (a, b, c):
            gradients.take(unit, _grad())
        gradients.finish()
        for unit in (a, b, c):
            yield f"the gradient of {unit.name}", unit.sharded_flat_param.grad
        yield "the gradient of d, of which none has come", d.sharded_flat_param.grad
        yield "how many are pending when all is handed over", pending(gradients)
        gradients.finish()
        yield "the gradient of a, after a second backward without it", a.sharded_flat_param.grad
    # The last part that is waited for: the only one, or the second half of an all-reduce.
    for fails, replicas, times in (("reduce 'c'", 1, 1), ("all-reduce 'c'", 2, 2)):
        with ExitStack() as stack:
            (a, b, c, d), streams = _units(stack, "abcd", replicas=replicas)
            gradients = Gradients(_watched(streams, [], fails, times))
            a.sharded_flat_param.grad = torch.ones_like(a.sharded_flat_param)
            for unit in (a, b, c):
                gradients.take(unit, _grad())
            of = f"(the last {fails})"
            yield (
                f"what finish() raises if the last reduction fails {of}",
                refused(gradients.finish),
            )
            changed = [unit.name for unit in (b, c, d) if unit.sharded_flat_param.grad is not None]
            changed += ["a"] * (not bool((a.sharded_flat_param.grad == 1).all()))
            yield f"gradients that are changed by a backward that fails {of}", sorted(changed)
    with ExitStack() as stack:
        units, streams = _units(stack, "abc", replicas=2)
        log: list[str] = []
        gradients = Gradients(_watched(streams, log, "reduce 'c'"))
        for unit in units:
            gradients.take(unit, _grad())
        refused(gradients.finish)
        so_far = len(log)
        gradients.drop()
        yield "what drop() waits for when the first half of c has failed", log[so_far:]


@check("gradients.2", because=_finish)
def what_was_reduced() -> Iterator[Any]:
    from minifsdp.core.gradients import Gradients

    with ExitStack() as stack:
        units, streams = _units(stack, "cab")
        gradients = Gradients(streams)
        for unit in units:
            gradients.take(unit, _grad())
        reduced: Any = gradients.finish()
        names = reduced and [reduction.unit.name for reduction in reduced]
        yield "the reductions that are returned, of c, a and b", names


@check("gradients.2", because=_finish)
def with_replicas_and_offload() -> Iterator[Any]:
    from minifsdp import CPUOffload, ShardingStrategy
    from minifsdp.core.gradients import Gradients
    from tutorials.exercises.virtual import train

    for settings in (
        {"replicas": 2},
        {"ranks": 1, "replicas": 2},
        {"offload": True, "replicas": 2},
    ):
        with ExitStack() as stack:
            units, streams = _units(stack, "abc", **settings)
            gradients = Gradients(streams)
            for unit in units:
                gradients.take(unit, _grad())
            gradients.finish()
            of = f"with replicas, {settings}"
            for unit in units:
                yield f"the gradient of {unit.name}, {of}", unit.sharded_flat_param.grad
    for offload in (False, True):
        gpu = train(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD, cpu_offload=CPUOffload(offload)
        )
        yield f"missing waits, HYBRID_SHARD, offload {offload}", [str(r) for r in gpu.races()[:1]]
        yield at_most("seconds of a step", gpu.report()["step"], slack=0.02)


@check("gradients.2", ranks=2, because=_finish)
def a_backward_that_fails_on_two_ranks() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import ShardingStrategy
    from tutorials.exercises.exact import batch, train, wrapped

    def fail(*_: Any) -> None:
        raise InterruptedError

    mesh = init_device_mesh("cpu", (2, 1))
    for strategy, of in (
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, mesh),
    ):
        model = wrapped(sharding_strategy=strategy, device_mesh=of)
        said = "with replicas" if of else "of two ranks"
        yield f"losses {said}", train(model, "ss")
        x = batch().requires_grad_()
        x.register_hook(fail)
        yield (
            f"a backward with an error at its end, {said}",
            refused(lambda x=x, m=model: m(x).sum().backward()),
        )
        yield (
            f"gradients changed by a backward that fails, {said}",
            [bool(param.grad.any()) for param in model.parameters() if param.grad is not None],
        )
        yield f"losses after that, {said}", train(model)
        yield f"parameters after that, {said}", model.state_dict()

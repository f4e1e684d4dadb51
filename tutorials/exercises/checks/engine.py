"""Checks of engine.py, the five moments: on one unit, on a virtual GPU, and on two ranks.

Without ranks there are two units, "now" and "next": the prefetcher names "next" at all moments.
"""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _raised(got: Any) -> bool:
    return isinstance(got, dict) and "raised" in got


def _reasons(state: Any) -> str:
    """What a unit is held for, of what watching.state() says."""
    return state.partition("held for ")[2] if isinstance(state, str) else ""


def _lost(want: Any, got: Any, own: str) -> str:
    """What is wrong where a unit has a reason to stay that is not this moment's, and does not stay.

    Args:
        own: the reasons of this moment.
    """
    kept = _reasons(want)
    if all(reason in _reasons(got) for reason in kept.split(" and ")):
        return (
            f"the unit is still held for {kept}, and is freed all the same: unit.let_go() frees a "
            f"unit when its last reason is gone, and parameters.reshard() frees it in any case"
        )
    return (
        f"let go of {own} only: the unit is also held for {kept}, by somebody who still needs it "
        f"and will let go of it later"
    )


def _of_training(what: str, want: Any, got: Any) -> str | None:
    """What training shows, on a GPU or on ranks; the same for all moments."""
    from tutorials.exercises.judge import ratio

    if _raised(got):
        return None
    factor = ratio(want, got)
    if what.startswith("the gradient") and factor == 2:
        return "the gradient is exactly 2 x too large: it was added up twice, or not averaged"
    if what.startswith("the gradient") and factor == 0.5:
        return "the gradient is half of what it should be: that of one rank is missing"
    if "races" in what:
        return "one stream uses memory that another one is still writing: a wait is missing"
    if "peak unsharded" in what or "that have memory" in what:
        return "units are not freed when nobody needs them any more"
    if "bytes sent" in what:
        return "units are gathered more often than they need to be: something is freed too early"
    if "seconds" in what:
        return "communication is not hidden: a gather is asked for only when its unit is needed"
    return None


def _on_a_gpu(steps: int = 3, **settings: Any) -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    gpu = train([1024] * 5, steps=steps, **settings)
    figures = gpu.report()
    yield "races on a GPU", [str(race) for race in gpu.races()]
    yield at_most("peak unsharded units on a GPU", figures["peak unsharded units"])
    yield at_most("bytes sent in a step on a GPU", figures["bytes sent"])
    yield at_most("seconds of a step on a GPU", figures["step"], slack=0.02)


def _before_forward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return (
            "a module computes with its parameters, so they have to be gathered, waited for, and "
            "given to it as views (make_views, show_views)"
        )
    if "the next unit" in what:
        if "no part of a step" in what:
            return "it is gathered although prefetch is False: this forward has no place in a step"
        return "the prefetcher's target is not gathered, so nothing hides its all-gather"
    if "the state" in what and str(got).startswith("SHARDED"):
        return "a module computes with its parameters, so they have to be gathered"
    if "the state" in what and _reasons(got) != "its forward":
        return (
            "hold the unit for its forward, and for nothing else (parameters.unshard(unit, "
            "FORWARD)): the moment after the forward lets go of FORWARD, and a unit that is held "
            "for another reason would not be freed then"
        )
    if "the module has" in what:
        return "the module still has its sharded parameters: show_views is missing"
    if "the memory" in what or "parameters of the module" in what or "the state" in what:
        return "the module would compute before the data is there: wait_for_unshard is missing"
    if "gradient" in what and "after" in what:
        return "autograd does not know these views: make new ones in each forward (make_views)"
    if "as early as" in what:
        return (
            "it waits for its own gather first, so the next one cannot use the network meanwhile: "
            "prefetch before you wait"
        )
    return _of_training(what, want, got)


@check("engine.1", because=_before_forward)
def a_forward_finds_its_parameters() -> Iterator[Any]:
    from tutorials.exercises.watching import gradient, has_memory, has_views, state, two_units

    for rank in (0, 1):
        with two_units(rank=rank) as (engine, now, following):
            engine.before_forward(now.unit, prefetch=True)
            yield "the state of the unit", state(now)
            yield "the memory of the unit", now.gathered
            yield "whether the module has its unsharded parameters", has_views(now)
            yield "parameters of the module", [
                now.module.weight, now.module.scale, now.module.bias
            ]  # fmt: skip
            yield "whether the next unit has memory", has_memory(following)
            (2 * now.module.weight.sum() + 3 * now.module.scale).backward()
            yield "the gradient after a backward", gradient(now.unit)


@check("engine.1", because=_before_forward)
def a_forward_that_is_no_part_of_a_step() -> Iterator[Any]:
    from tutorials.exercises.watching import gradient, has_memory, state, two_units

    with two_units() as (engine, now, following):
        engine.before_forward(now.unit, prefetch=False)
        yield "the state of the unit", state(now)
        yield "whether the next unit has memory, in no part of a step", has_memory(following)
    with two_units() as (engine, now, following):
        for turn in ("first", "second"):
            engine.before_forward(now.unit, prefetch=True)
            yield f"the state of the unit in its {turn} forward", state(now)
            (2 * now.module.weight.sum()).backward()
            yield (
                f"the gradient after the backward of its {turn} forward",
                gradient(now.unit),
            )


@check("engine.1", because=_before_forward)
def before_forward_on_a_gpu() -> Iterator[Any]:
    yield from _on_a_gpu()
    yield from _on_a_gpu(forward_prefetch=True)


@check("engine.1", ranks=2, because=_before_forward)
def before_forward_on_two_ranks() -> Iterator[Any]:
    from tutorials.exercises.watching import Nested, started_before_a_wait, trained, wrapped

    yield from trained(wrapped(Nested()))
    yield (
        "units whose gather starts as early as it can in a forward",
        started_before_a_wait(wrapped(Nested()), "forward"),
    )


def _after_forward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "just before the next unit" in what:
        return "free the unit before you prefetch, so that the next one can have its memory"
    if "the next unit" in what:
        if "no part of a step" in what:
            return "it is gathered although prefetch is False: this forward has no place in a step"
        return "the prefetcher's target after a forward is not gathered"
    if "checkpoint" in what:
        return (
            "a forward that runs again in its own backward (BACKWARD is among the unit's reasons) "
            "leaves the unit's views and state as they are, and only lets go of FORWARD: the "
            "backward computes with these parameters"
        )
    if "lists" in what:
        return (
            "when its module runs no more, the module lists its sharded parameters, also where the "
            "unit stays gathered (hide_views)"
        )
    if "the state" in what and isinstance(got, str):
        return _state_after_forward(what, want, got)
    return _of_training(what, want, got)


def _state_after_forward(what: str, want: str, got: str) -> str:
    if "as well" in what and "its forward" not in _reasons(got):
        return _lost(want, got, "FORWARD")
    if "its forward" in _reasons(got):
        return (
            "the forward is over, and the unit is still held for it: unit.let_go(FORWARD), or else "
            "no unit is freed until the next step"
        )
    if "without gradients" in what:
        return (
            "no backward follows where gradients are off: nothing is held for STRATEGY then, and "
            "no unit changes its state"
        )
    if "has raised" in what and _reasons(want) != "nothing":
        return _lost(want, got, "FORWARD")
    if "has raised" in what:
        return "leave() lets go of FORWARD and does no more: no backward follows a failed forward"
    if "its strategy" in _reasons(want):
        if "its strategy" in _reasons(got):
            return (
                "hold the unit for STRATEGY before you let go of FORWARD: a unit is freed when its "
                "last reason is gone, and hold() does not gather it again"
            )
        if "root" in what:
            return (
                "the root stays (hold it for STRATEGY): its backward comes right after its "
                "forward, so to free it would gain nothing"
            )
        return (
            "a unit whose strategy keeps it (reshard_after_forward=False) stays for its backward: "
            "hold it for STRATEGY, or else it is gathered twice in a step"
        )
    if "its strategy" in _reasons(got):
        return (
            "only the root, and units with reshard_after_forward=False, are held for STRATEGY: "
            "otherwise all units are in memory when the forward ends"
        )
    return (
        "after a forward with gradients a unit is freed, and its state is FORWARD: a backward may "
        "follow (unit.state.run_forward)"
    )


@check("engine.2", because=_after_forward)
def a_unit_is_freed_after_its_forward() -> Iterator[Any]:
    import torch

    from minifsdp.core.unit_state import STRATEGY
    from tutorials.exercises.watching import (
        gathered_for_forward,
        has_memory,
        lists_shard,
        state,
        two_units,
    )

    with two_units() as (engine, now, following):
        gathered_for_forward(now)
        engine.after_forward(now.unit, prefetch=True)
        yield "the state of a unit after its forward", state(now)
        yield "whether the next unit has memory", has_memory(following)
    with two_units() as (engine, now, following):
        gathered_for_forward(now)
        engine.after_forward(now.unit, prefetch=False)
        yield "whether the next unit has memory, in no part of a step", has_memory(following)
    with two_units() as (engine, now, following), torch.no_grad():
        gathered_for_forward(now)
        engine.after_forward(now.unit, prefetch=True)
        yield "the state of a unit after a forward without gradients", state(now)
        yield "whether the next unit has memory", has_memory(following)
    for reasons in ((), (STRATEGY,)):
        with two_units() as (engine, now, _):
            gathered_for_forward(now, *reasons)
            engine.leave(now.unit)
            yield "the state of a unit whose module has raised an error (leave)", state(now)
            yield "whether that module lists its shard", lists_shard(now)


@check("engine.2", because=_after_forward)
def a_unit_is_freed_before_the_next_is_asked_for() -> Iterator[Any]:
    from tutorials.exercises.watching import gathered_for_forward, has_memory, two_units

    with two_units() as (engine, now, _):
        gathered_for_forward(now)
        prefetch, seen = engine.parameters.prefetch, []

        def noted(*args: Any) -> None:
            seen.append(has_memory(now))
            prefetch(*args)

        engine.parameters.prefetch = noted  # type: ignore[method-assign]
        engine.after_forward(now.unit, prefetch=True)
        yield "whether the unit has memory just before the next unit is gathered", seen


@check("engine.2", because=_after_forward)
def other_reasons_are_left_alone() -> Iterator[Any]:
    import torch

    from minifsdp.checks.rank_agreement import DIVERGED
    from minifsdp.no_sync import NO_SYNC
    from tutorials.exercises.watching import gathered_for_forward, lists_shard, state, two_units

    for reason in (NO_SYNC, DIVERGED):
        for grad in (True, False):
            with two_units() as (engine, now, _), torch.set_grad_enabled(grad):
                gathered_for_forward(now, reason)
                engine.after_forward(now.unit, prefetch=False)
                of = "with gradients" if grad else "without gradients"
                yield f"the state of a unit that is held for {reason} as well, {of}", state(now)
                yield "whether parameters() lists its shard", lists_shard(now)


@check("engine.2", because=_after_forward)
def some_units_stay() -> Iterator[Any]:
    import torch

    from minifsdp.core.unit_state import FORWARD, STRATEGY
    from tutorials.exercises.watching import (
        gathered_for_backward,
        gathered_for_forward,
        has_views,
        lists_shard,
        root_of,
        state,
        two_units,
    )

    for name in ("a unit with reshard_after_forward=False", "the root"):
        for grad in (True, False):
            with two_units() as (engine, now, _), torch.set_grad_enabled(grad):
                lone = now if name != "the root" else root_of(engine)
                lone.unit.reshard_after_forward = lone is not now
                gathered_for_forward(lone)
                engine.after_forward(lone.unit, prefetch=False)
                of = "a forward" if grad else "a forward without gradients"
                yield f"the state of {name} after {of}", state(lone)
                yield f"whether parameters() of {name} lists its shard", lists_shard(lone)
    for reasons in ((), (STRATEGY,)):
        for grad in (True, False):  # without, as in a reentrant checkpoint
            with two_units() as (engine, now, _), torch.set_grad_enabled(grad):
                now.unit.reshard_after_forward = not reasons
                gathered_for_backward(now, *reasons)
                now.unit.hold(FORWARD)
                engine.after_forward(now.unit, prefetch=False)
                yield "the state of a unit in a checkpoint", state(now)
                yield (
                    "whether its module has its unsharded parameters in a checkpoint",
                    has_views(now),
                )


@check("engine.2", because=_after_forward)
def after_forward_on_a_gpu() -> Iterator[Any]:
    from minifsdp import ForwardPrefetch, ShardingStrategy

    yield from _on_a_gpu()
    yield from _on_a_gpu(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    yield from _on_a_gpu(forward_prefetch=ForwardPrefetch.FORWARD_POST)


@check("engine.2", ranks=2, because=_after_forward)
def after_forward_on_two_ranks() -> Iterator[Any]:
    import torch

    from minifsdp import ShardingStrategy
    from tests.small import storage
    from tutorials.exercises.watching import Nested, batch, trained, wrapped

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = wrapped(Nested(), sharding_strategy=strategy)
        yield from trained(model, 2)
        with torch.no_grad():
            model(batch(0))
        yield (
            "units that have memory after an evaluation",
            [unit.name for unit in model.engine.units if storage(unit)],
        )
        model(batch(0))
        yield (
            f"units that have memory after a forward, {strategy.name}",
            [unit.name or "root" for unit in model.engine.units if storage(unit)],
        )
        yield at_most("all-gathers on two ranks", model.engine.stats.all_gathers)


def _before_backward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return "a backward needs the parameters: gather, wait, and give them to the module"
    if "the next unit" in what:
        return "the prefetcher's target is not gathered, so nothing hides its all-gather"
    if "state" in what and str(got).startswith("SHARDED"):
        return "a backward needs the parameters: gather, wait, and give them to the module"
    if "state" in what and isinstance(got, str) and "PRE_BACKWARD" not in got:
        return "nobody knows that the unit's backward has started (unit.state.start_backward)"
    if "state" in what and _reasons(got) != _reasons(want):
        return (
            "hold the unit for its backward (parameters.unshard(unit, BACKWARD)): that is the "
            "reason that is let go when its gradient is complete, and with another one the unit "
            "would not be freed then"
        )
    if "the memory" in what or "the state" in what:
        return "the backward would compute before the data is there: wait_for_unshard is missing"
    if "views are still" in what:
        return (
            "make no new views: the graph has those of the forward, which show the same memory, "
            "and no gradient would come to new ones"
        )
    if "autograd's number" in what:
        return "the state keeps the number of the backward: start_backward(graph_task)"
    if "the module has" in what:
        return (
            "an activation checkpoint runs the module again in its backward, so it has to have "
            "its unsharded views (show_views)"
        )
    if "as early as" in what:
        return (
            "it waits for its own gather first, so the next one cannot use the network meanwhile: "
            "prefetch before you wait"
        )
    return _of_training(what, want, got)


@check("engine.3", because=_before_backward)
def a_backward_finds_its_parameters() -> Iterator[Any]:
    from tutorials.exercises.watching import has_memory, has_views, state, two_units

    with two_units() as (engine, now, following):
        engine.before_forward(now.unit, prefetch=False)
        engine.after_forward(now.unit, prefetch=False)
        views = [*now.unit.views]  # kept, so that no other tensor has their places
        engine.before_backward(now.unit, 7)
        kept = [*map(id, now.unit.views)] == [*map(id, views)]
        yield "the state of the unit", state(now)
        yield "whether the views are still those of the forward", kept
        yield "autograd's number of the backward", now.unit.state.graph_task
        yield "the memory of the unit", now.gathered
        yield "whether the module has its unsharded parameters", has_views(now)
        yield "whether the next unit has memory", has_memory(following)


@check("engine.3", because=_before_backward)
def before_backward_on_a_gpu() -> Iterator[Any]:
    yield from _on_a_gpu()
    yield from _on_a_gpu(steps=1)


@check("engine.3", ranks=2, because=_before_backward)
def before_backward_on_two_ranks() -> Iterator[Any]:
    from minifsdp import BackwardPrefetch
    from tutorials.exercises.watching import Nested, started_before_a_wait, trained, wrapped

    for setting in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST):
        yield from trained(wrapped(Nested(), backward_prefetch=setting), 2)
    yield (
        "units whose gather starts as early as it can in a backward",
        started_before_a_wait(wrapped(Nested()), "backward"),
    )
    yield from trained(wrapped(Nested()), 2, lambda m, x: (m(x), m.kept.pow(2).sum())[1])


def _after_gradient(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "the next unit" in what:
        if "before" in what:
            return "free the unit before you prefetch, so that the next one can have its memory"
        return "the prefetcher's target after a backward is not gathered"
    if "has to wait" in what:
        return (
            "a gradient that has to wait (unit.waits: in no_sync, or where ranks have diverged and "
            "some would never come to the reduction) is held: give it to self.gradients.take(), "
            "which sees to that"
        )
    if "without parameters" in what:
        return "a unit without parameters (numel is 0) has nothing to reduce or to hold"
    if "state" in what and isinstance(got, str):
        if "POST_BACKWARD" not in got:
            return "the state has to say that the gradient is complete (unit.state.complete_grad)"
        if "its backward" in _reasons(got):
            return (
                "nobody needs the parameters any more: let go of BACKWARD, and the unit is freed "
                "if it has no other reason to stay"
            )
        if "its strategy" in _reasons(got):
            return (
                "a strategy keeps a unit from its forward to its backward, which is over: let go "
                "of STRATEGY as well, or else the unit stays until the whole backward has ended"
            )
        if "as well" in what:
            return _lost(want, got, "BACKWARD and STRATEGY")
        return "nobody needs the parameters any more: unit.let_go(BACKWARD, STRATEGY) frees them"
    if "reductions" in what:
        return "the gradient has to be reduced, once (self.gradients.take)"
    if "seconds" in what:
        return (
            "the next gather waits behind the reduction: collectives run in the order of their "
            "launch, so prefetch before you reduce"
        )
    if "loss" in what or "parameters after" in what or "gradient" in what:
        return _of_training(what, want, got) or (
            "each rank has its own gradient: all of them have to be reduced, each one once"
        )
    return _of_training(what, want, got)


@check("engine.4", because=_after_gradient)
def a_gradient_is_reduced() -> Iterator[Any]:
    import torch

    from minifsdp.core.unit_state import STRATEGY
    from tutorials.exercises.watching import (
        gathered_for_backward,
        has_memory,
        pending,
        state,
        two_units,
    )

    with two_units() as (engine, now, following):
        gathered_for_backward(now)
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "the state of a unit whose gradient is complete", state(now)
        yield "whether the next unit has memory", has_memory(following)
        yield "reductions that were started", engine.stats.reductions
        engine.gradients.finish()
        yield "the gradient that the optimizer gets", now.unit.sharded_flat_param.grad
    with two_units() as (engine, now, _):
        now.unit.reshard_after_forward = False
        gathered_for_backward(now, STRATEGY)
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "the state of a unit that its strategy has kept for its backward", state(now)
    with two_units() as (engine, now, _):
        gathered_for_backward(now)
        now.unit.numel = 0
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "reductions for a unit without parameters", engine.stats.reductions
        yield "gradients pending of a unit without parameters", pending(engine.gradients)


@check("engine.4", because=_after_gradient)
def a_unit_is_freed_before_the_next_is_gathered() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import gathered_for_backward, has_memory, two_units

    with two_units() as (engine, now, _):
        gathered_for_backward(now)
        prefetch, seen = engine.parameters.prefetch, []

        def noted(*args: Any) -> None:
            seen.append(has_memory(now))
            prefetch(*args)

        engine.parameters.prefetch = noted  # type: ignore[method-assign]
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "whether the unit has memory just before the next unit is gathered", seen


@check("engine.4", because=_after_gradient)
def reasons_to_stay_and_reasons_to_wait() -> Iterator[Any]:
    import torch

    from minifsdp.checks.rank_agreement import DIVERGED
    from minifsdp.core.unit_state import FORWARD, STRATEGY
    from minifsdp.no_sync import NO_SYNC
    from tutorials.exercises.watching import gathered_for_backward, pending, state, two_units

    for reason in (NO_SYNC, DIVERGED, FORWARD):  # the last: of a forward that calls autograd.grad
        for kept in ((), (STRATEGY,)):
            with two_units() as (engine, now, _):
                gathered_for_backward(now, reason, *kept)
                engine.after_gradient(now.unit, torch.arange(10.0))
                name = f"the state of a unit that is held for {reason} as well"
                yield f"{name}, when its gradient is complete", state(now)
    for reason in (NO_SYNC, DIVERGED):
        with two_units() as (engine, now, _):
            gathered_for_backward(now)
            now.unit.waits.add(reason)
            engine.after_gradient(now.unit, torch.arange(10.0))
            of = f"a gradient that has to wait ({reason})"
            yield f"reductions started of {of}", engine.stats.reductions
            yield f"how many gradients are held, of {of}", pending(engine.gradients)
            yield f"the state of the unit of {of}", state(now)


@check("engine.4", because=_after_gradient)
def after_gradient_on_a_gpu() -> Iterator[Any]:
    from minifsdp import BackwardPrefetch

    yield from _on_a_gpu()
    yield from _on_a_gpu(backward_prefetch=BackwardPrefetch.BACKWARD_POST)


@check("engine.4", ranks=2, because=_after_gradient)
def after_gradient_on_two_ranks() -> Iterator[Any]:
    from minifsdp import BackwardPrefetch
    from tutorials.exercises.watching import Nested, accumulated, trained, wrapped

    yield from trained(wrapped(Nested(), backward_prefetch=BackwardPrefetch.BACKWARD_POST))
    model = wrapped(Nested())
    yield from accumulated(model)
    yield "reductions of a step with no_sync", model.engine.stats.reductions


_OVER = {
    "its backward": "BACKWARD: no gradient of its own has come, so nobody else has let go of it",
    "its strategy": "STRATEGY: the backward for which its strategy has kept it is over",
    "a prefetch": "PREFETCH: it was gathered ahead, and its turn has not come",
}


def _end(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "lists" in what:
        return "also a unit that stays gathered lists its shards when the backward is over"
    if "state" in what and isinstance(got, str):
        for reason, name in _OVER.items():
            if reason in _reasons(got) and reason not in _reasons(want):
                return f"free every unit at the end: this one is still held for {name}"
        if "no_sync" in what and _reasons(want) != "nothing":
            return "in no_sync a unit that its strategy keeps stays for the next forward: " + _lost(
                want, got, "BACKWARD, STRATEGY and PREFETCH"
            )
        if "forward is running" in what:
            return (
                "a unit whose forward is running (it is held for FORWARD) still computes with its "
                "parameters: do not let go of FORWARD here, and do not free it"
            )
        return "each unit's state has to end its backward (unit.state.end_backward)"
    if "forward is running" in what:
        return (
            "a unit whose forward is running (it is held for FORWARD) still computes with its "
            "parameters: its module keeps its unsharded views"
        )
    if "are returned" in what and want != got:
        return (
            "layers go on with the reductions, such as the one that calls users' hooks: return "
            "what self.gradients.finish() returns"
        )
    if "optimizer" in what or (what.startswith("the gradient") and got is None):
        return (
            "the reductions are not waited for, so the optimizer gets no gradient "
            "(self.gradients.finish)"
        )
    if "expected" in what or "that have memory" in what:
        return "a unit is still gathered when the backward is over: free every unit"
    return _of_training(what, want, got) or (
        "the reductions are not waited for, or not for all: self.gradients.finish()"
        if "gradient" in what or "loss" in what or "parameters" in what
        else None
    )


@check("engine.5", because=_end)
def gradients_reach_the_optimizer() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import gathered_for_backward, pending, state, two_units

    with two_units() as (engine, now, following):
        gathered_for_backward(now)
        gathered_for_backward(following)  # no gradient of its own will come
        engine.after_gradient(now.unit, torch.arange(10.0))
        reduced: Any = engine.end_of_backward()
        yield "the gradient that the optimizer gets", now.unit.sharded_flat_param.grad
        yield (
            "units of the reductions that are returned",
            reduced and [one.unit.name for one in reduced],
        )
        yield "gradients that are still pending for the optimizer", pending(engine.gradients)
        yield "the state of a unit after the backward", state(now)
        yield "the state of a unit without a gradient", state(following)
        yield "the state of a unit without a forward", str(engine.root.state.training)


@check("engine.5", because=_end)
def every_unit_is_freed_but_those_in_use() -> Iterator[Any]:
    from minifsdp.core.unit_state import FORWARD, STRATEGY
    from tutorials.exercises.watching import (
        gathered_for_backward,
        gathered_for_forward,
        has_views,
        lists_shard,
        state,
        two_units,
    )

    with two_units() as (engine, now, following):
        now.unit.reshard_after_forward = False
        gathered_for_forward(now)
        engine.after_forward(now.unit, prefetch=True)
        engine.end_of_backward()  # of a part of the model without these two
        yield "the state of a unit that its strategy has kept, without a gradient", state(now)
        yield "the state of a unit that was prefetched, and not needed", state(following)
    for reasons in ((FORWARD,), (FORWARD, STRATEGY)):
        with two_units() as (engine, now, following):
            gathered_for_backward(now, *reasons)
            gathered_for_backward(following)
            engine.end_of_backward()
            yield "the state of a unit whose forward is running", state(now)
            yield (
                "whether its module has its unsharded parameters, while its forward is running",
                has_views(now),
            )
            yield "the state of a unit without a gradient, beside it", state(following)
            yield "whether parameters() of that one lists its shard", lists_shard(following)


@check("engine.5", because=_end)
def what_a_backward_leaves_in_no_sync() -> Iterator[Any]:
    import torch

    from minifsdp.core.unit_state import STRATEGY
    from minifsdp.no_sync import NO_SYNC
    from tutorials.exercises.watching import (
        gathered_for_backward,
        lists_shard,
        state,
        two_units,
    )

    with two_units() as (engine, now, following):
        now.unit.reshard_after_forward = False
        gathered_for_backward(now, NO_SYNC, STRATEGY)
        gathered_for_backward(following)
        for lone in (now, following):
            lone.unit.waits.add(NO_SYNC)
        engine.after_gradient(now.unit, torch.arange(10.0))
        engine.end_of_backward()
        yield "the state of a unit that stays in no_sync", state(now)
        yield "whether its module lists its shard after no_sync", lists_shard(now)
        yield "the state of another unit after the backward", state(following)
        yield "its gradient, which is still held for no_sync", engine.gradients.held.get(now.unit)


@check("engine.5", because=_end)
def end_of_backward_on_a_gpu() -> Iterator[Any]:
    from minifsdp import ShardingStrategy

    yield from _on_a_gpu()
    yield from _on_a_gpu(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@check("engine.5", ranks=2, because=_end)
def end_of_backward_on_two_ranks() -> Iterator[Any]:
    from minifsdp import ShardingStrategy
    from tutorials.exercises.watching import Nested, accumulated, trained, wrapped

    yield from trained(wrapped(Nested()))
    model = Nested()
    model.stage.requires_grad_(False)
    yield from trained(wrapped(model))
    model = wrapped(Nested(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    yield from accumulated(model)
    yield at_most("all-gathers of a step with no_sync", model.engine.stats.all_gathers)

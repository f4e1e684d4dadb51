"""Checks of engine.py, the five moments: on one unit, on a virtual GPU, and on two ranks.

Without ranks there are two units, "now" and "next": the prefetcher names "next" at all moments.
"""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _raised(got: Any) -> bool:
    return isinstance(got, dict) and "raised" in got


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
            "given to it as views (make_views, use_unsharded_views)"
        )
    if "the next unit" in what:
        if "no part of a step" in what:
            return "it is gathered although prefetch is False: this forward has no place in a step"
        return "the prefetcher's target is not gathered, so nothing hides its all-gather"
    if "the module has" in what:
        return "the module still has its sharded parameters: use_unsharded_views is missing"
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
    if "without gradients" in what:
        return "no backward follows where gradients are off: nothing stays, nor changes its state"
    if "the next unit" in what:
        if "no part of a step" in what:
            return "it is gathered although prefetch is False: this forward has no place in a step"
        return "the prefetcher's target after a forward is not gathered"
    if "checkpoint" in what:
        return (
            "a forward that runs again in its own backward (PRE_BACKWARD) must leave everything "
            "as it is: the backward computes with these parameters"
        )
    if "lists" in what:
        return (
            "between forward and backward the module lists its sharded parameters, also where the "
            "unit stays gathered (use_sharded_views)"
        )
    if "root" in what:
        return "the root stays: its backward comes right after its forward"
    if "reshard_after_forward" in what and got is True:
        return "it stays although no backward will follow: only in the state FORWARD does it"
    if "reshard_after_forward" in what:
        return "a unit whose strategy keeps it (not reshard_after_forward) stays for its backward"
    if "the state" in what:
        return (
            "after a forward with gradients a unit is freed, and its state is FORWARD: a backward "
            "may follow (unit.state.run_forward)"
        )
    return _of_training(what, want, got)


@check("engine.2", because=_after_forward)
def a_unit_is_freed_after_its_forward() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import has_memory, state, two_units

    with two_units() as (engine, now, following):
        now.fill()
        engine.after_forward(now.unit, prefetch=True)
        yield "the state of a unit after its forward", state(now)
        yield "whether the next unit has memory", has_memory(following)
    with two_units() as (engine, now, following):
        now.fill()
        engine.after_forward(now.unit, prefetch=False)
        yield "whether the next unit has memory, in no part of a step", has_memory(following)
    with two_units() as (engine, now, following), torch.no_grad():
        now.fill()
        engine.after_forward(now.unit, prefetch=True)
        yield "the state of a unit after a forward without gradients", state(now)


@check("engine.2", because=_after_forward)
def some_units_stay() -> Iterator[Any]:
    import torch

    from minifsdp.support.param_views import make_views, use_unsharded_views
    from tutorials.exercises.watching import has_views, state, two_units

    for keeps in (False, True):
        with two_units() as (engine, now, _):
            name = "a unit without reshard_after_forward" if keeps else "a unit"
            now.unit.reshard_after_forward = not keeps
            yield f"whether {name} stays before its forward", engine.stays_after_forward(now.unit)
            now.unit.state.run_forward()
            yield f"whether {name} stays, FORWARD", engine.stays_after_forward(now.unit)
            with torch.no_grad():
                stays = engine.stays_after_forward(now.unit)
            yield f"whether {name} stays, without gradients", stays
            now.unit.state.start_backward(0)
            with torch.no_grad():  # as a reentrant checkpoint does
                stays = engine.stays_after_forward(now.unit)
            yield f"whether {name} stays in a checkpoint, PRE_BACKWARD", stays
            now.unit.state.complete_grad()
            yield f"whether {name} stays, POST_BACKWARD", engine.stays_after_forward(now.unit)
    with two_units() as (engine, now, _):
        engine.root.state.run_forward()
        yield "whether the root stays, FORWARD", engine.stays_after_forward(engine.root)
        now.unit.reshard_after_forward = False
        now.fill()
        make_views(now.unit)
        use_unsharded_views(now.unit)
        engine.after_forward(now.unit, prefetch=False)
        yield "the state of a unit without reshard_after_forward", state(now)
        yield (
            "whether parameters() lists the shards",
            all(p is now.unit.sharded_flat_param for p in now.module.parameters()),
        )
    with two_units() as (engine, now, _):
        now.fill()
        make_views(now.unit)
        use_unsharded_views(now.unit)
        now.unit.state.start_backward(0)
        engine.after_forward(now.unit, prefetch=False)
        yield "the state of a unit in a checkpoint", state(now)
        yield "whether its module has its unsharded parameters in a checkpoint", has_views(now)


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
        if "twice" in what or "precision" in what:
            return "what the forward has computed with is given to you: compute_with() it"
        return "a backward needs the parameters: gather, wait, and give them to the module"
    if "the next unit" in what:
        return "the prefetcher's target is not gathered, so nothing hides its all-gather"
    if "state" in what and isinstance(got, str) and "PRE_BACKWARD" not in got:
        return "nobody knows that the unit's backward has started (unit.state.start_backward)"
    if "the memory" in what or "the state" in what:
        return "the backward would compute before the data is there: wait_for_unshard is missing"
    if "autograd's number" in what:
        return "the state keeps the number of the backward: start_backward(graph_task)"
    if "the module has" in what:
        return (
            "an activation checkpoint runs the module again in its backward, so it has to have "
            "its unsharded views (use_unsharded_views)"
        )
    if "precision" in what:
        return (
            "the forward has computed in another precision: reshard the unit, and compute_with() "
            "what you are given"
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
        engine.before_backward(now.unit, now.unit.unsharded, 7)
        yield "the state of the unit", state(now)
        yield "autograd's number of the backward", now.unit.state.graph_task
        yield "the memory of the unit", now.gathered
        yield "whether the module has its unsharded parameters", has_views(now)
        yield "whether the next unit has memory", has_memory(following)


@check("engine.3", because=_before_backward)
def a_forward_in_another_precision() -> Iterator[Any]:
    import torch

    from minifsdp import MixedPrecision
    from tutorials.exercises.watching import has_views, state, two_units

    precision = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    with two_units(precision=precision) as (engine, now, _):
        before = now.unit.unsharded
        engine.before_forward(now.unit, prefetch=False)
        engine.after_forward(now.unit, prefetch=False)
        now.unit.choose_precision(training=False)
        engine.before_backward(now.unit, before, 0)
        yield "the state of a unit, in the precision of its forward", state(now)
        yield "the precision of the gathered parameters", now.unit.unsharded.data.dtype
        yield "whether the module has its unsharded parameters", has_views(now)
        yield "the precision of the module's weight", now.module.weight.dtype


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
        return "the prefetcher's target after a backward is not gathered"
    if "no_sync" in what:
        if "stays" in what:
            return (
                "in no_sync a unit that its strategy keeps is not freed, since no optimizer steps "
                "before its next forward (stays_after_backward)"
            )
        return "in no_sync a gradient is held (self.gradients.hold), and nothing is sent"
    if "diverged" in what:
        return (
            "where ranks have diverged (not agreement.may_reduce) some would never come to the "
            "reduction: hold the gradient"
        )
    if "without parameters" in what:
        return "a unit without parameters (numel is 0) has nothing to reduce or to hold"
    if "state" in what and isinstance(got, str):
        if "POST_BACKWARD" not in got:
            return "the state has to say that the gradient is complete (unit.state.complete_grad)"
        return "nobody needs the parameters any more: free them (reshard_after_use)"
    if "reductions" in what:
        return "the gradient has to be reduced, once (self.gradients.reduce)"
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

    from tutorials.exercises.watching import gathered_for_backward, has_memory, state, two_units

    with two_units() as (engine, now, following):
        gathered_for_backward(engine, now)
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "the state of a unit whose gradient is complete", state(now)
        yield "whether the next unit has memory", has_memory(following)
        yield "reductions that were started", engine.stats.reductions
        engine.gradients.finish()
        yield "the gradient that the optimizer gets", now.unit.sharded_flat_param.grad


@check("engine.4", because=_after_gradient)
def gradients_that_are_not_reduced_yet() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import gathered_for_backward, has_memory, state, two_units

    for stays in (False, True):
        with two_units() as (engine, now, _):
            now.unit.reshard_after_forward = not stays
            gathered_for_backward(engine, now)
            with engine.no_sync():
                engine.after_gradient(now.unit, torch.arange(10.0))
                if stays:
                    yield "whether a unit that stays has memory in no_sync", has_memory(now)
                yield "reductions that were started in no_sync", engine.stats.reductions
                yield "gradients that are held in no_sync", engine.gradients.pending
    with two_units() as (engine, now, _):
        gathered_for_backward(engine, now)
        engine.agreement.diverged = True
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "reductions that were started when ranks have diverged", engine.stats.reductions
        yield "gradients that are held when ranks have diverged", engine.gradients.pending
    with two_units() as (engine, now, _):
        gathered_for_backward(engine, now)
        now.unit.reshard_after_forward = False
        engine.after_gradient(now.unit, torch.arange(10.0))
        yield "the state of a unit that stays after a forward only", state(now)


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


def _end(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "no_sync" in what:
        if "lists" in what:
            return "also a unit that stays gathered lists its shards when the backward is over"
        return (
            "in no_sync a unit that its strategy keeps stays gathered for the next forward, if "
            "kept_version says which version of the shard it has"
        )
    if "forward is running" in what:
        return "a unit whose forward is running (in_use) still computes with its parameters"
    if "diverged" in what:
        return "when the backward is over, ranks are together again (agreement.diverged = False)"
    if "order" in what:
        return "where ranks have diverged, each has seen another order: forget it"
    if "late" in what:
        return (
            "units in agreement.late have to be reduced at the end by all ranks, with zeros where "
            "a rank has no gradient (gradients.reduce_held)"
        )
    if "state" in what and isinstance(got, str):
        if got.startswith("UNSHARD"):
            return (
                "a unit is still gathered, because no gradient of its own has come: free every "
                "unit at the end"
            )
        return "each unit's state has to end its backward (unit.state.end_backward)"
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

    from tutorials.exercises.watching import gathered_for_backward, state, two_units

    with two_units() as (engine, now, following):
        gathered_for_backward(engine, now)
        gathered_for_backward(engine, following)  # no gradient of its own will come
        engine.after_gradient(now.unit, torch.arange(10.0))
        engine.end_of_backward(set())
        yield "the gradient that the optimizer gets", now.unit.sharded_flat_param.grad
        yield "gradients that are still pending for the optimizer", engine.gradients.pending
        yield "the state of a unit after the backward", state(now)
        yield "the state of a unit without a gradient", state(following)
        yield "the state of a unit without a forward", str(engine.root.state.training)
    with two_units() as (engine, now, following):
        for lone in (now, following):
            gathered_for_backward(engine, lone)
        engine.end_of_backward({following.unit})
        yield "the state of a unit without a gradient", state(now)
        yield "the state of a unit whose forward is running", state(following)


@check("engine.5", because=_end)
def what_a_backward_leaves_in_no_sync() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import gathered_for_backward, state, two_units

    with two_units() as (engine, now, following):
        now.unit.reshard_after_forward = False
        gathered_for_backward(engine, now)
        gathered_for_backward(engine, following)
        with engine.no_sync():
            engine.after_gradient(now.unit, torch.arange(10.0))
            engine.end_of_backward(set())
        yield "the state of a unit that stays in no_sync", state(now)
        yield (
            "whether its kept version is that of its shard, in no_sync",
            now.unit.kept_version == now.unit.sharded_flat_param._version,
        )
        yield (
            "whether its module lists its shard after no_sync",
            all(p is now.unit.sharded_flat_param for p in now.module.parameters()),
        )
        yield "the state of another unit after the backward", state(following)
        yield "its unreduced gradient", now.unit.unreduced_grad.grad


@check("engine.5", because=_end)
def ranks_that_have_diverged() -> Iterator[Any]:
    import torch

    from tutorials.exercises.watching import gathered_for_backward, two_units

    with two_units() as (engine, now, following):
        gathered_for_backward(engine, now)
        engine.agreement.diverged, engine.agreement.late = True, [now.unit, following.unit]
        engine.prefetcher.pre_backward_order.visit(now.unit)
        engine.after_gradient(now.unit, torch.arange(10.0))
        engine.end_of_backward(set())
        yield "the gradient of a late unit", now.unit.sharded_flat_param.grad
        yield (
            "the gradient of a late unit that this rank has not used",
            (following.unit.sharded_flat_param.grad),
        )
        yield "whether ranks have diverged after it", engine.agreement.diverged
        engine.prefetcher.pre_backward_order.start()
        yield (
            "units in the order that the next backward goes by",
            len(engine.prefetcher.pre_backward_order.last),
        )


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

"""Checks of reduce.py: one unit alone, a virtual GPU, and two ranks."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import of_training, ratio
from tutorials.exercises.observe import at_most

STAGE = ("stream", "travels", "on_host")  # what a stage says of itself


def _mean(what: str, want: Any, got: Any) -> str | None:
    message = got.get("message", "") if isinstance(got, dict) else ""
    if missing := [name for name in STAGE if f"no attribute '{name}'" in message]:
        return (
            f"a stage has three attributes beside launch(), and {missing[0]} is not there: stream, "
            f"the name of the stream that it runs on; travels; and on_host (see Stage)"
        )
    if "process group" in message:
        return "unit.shard_world_size says how many ranks share the unit: it has its own group"
    factor = ratio(want, got)
    if factor is not None and factor > 1:
        is_sum = factor == round(factor)
        why = "it was summed, not averaged" if is_sum else "divide by the number of ranks"
        return f"the gradient is exactly {factor:g} x too large: {why}"
    if factor is not None:
        return f"the gradient is {factor:g} x what it should be: it was averaged more than once"
    if what.startswith("gradient") and isinstance(got, torch.Tensor) and got.shape == want.shape:
        return (
            "unit.comm is given the scale, and what each rank sends is scaled by it: none scales "
            "its own before (and here the other ranks are pretended)"
        )
    if "passed" in what:
        return "start the reduction and return: the backward goes on while it travels"
    if "collectives" in what:
        return "shards are reduce-scattered, replicas all-reduced, and hybrid sharding does both"
    if "seconds" in what:
        return "no reduction is hidden behind the computation: something waits for it too early"
    return of_training(what, want, got)


def _reduced(lone: Any, grad: torch.Tensor) -> Iterator[Any]:
    """A whole reduction, with the reference's functions around those that are looked at."""
    from minifsdp.core.reduce import Reduction, store_gradient

    reduction = Reduction(lone.unit, grad, lone.streams)
    reduction.start()
    yield "passed at once", reduction.event.query()
    more = [reduction.advance()]
    yield "passed after the first stage", reduction.event.query()
    more += [reduction.advance() for _ in range(3)]
    yield "what advance() returns, called four times", more
    reduction.wait_for_result()
    store_gradient(reduction)
    for group in (lone.unit.shard_group, lone.unit.replicate_group):
        if group is not None:
            yield "collectives", group.called
    yield "gradient of the shard", lone.unit.sharded_flat_param.grad


def _alone(reduce_dtype: bool) -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from tests.lone_unit import lone_unit

    cases: list[tuple[str, dict[str, Any]]] = [
        ("rank 0 of 2", {}),
        ("rank 2 of 3", {"rank": 2, "ranks": 3}),
        ("2 ranks, 2 replicas", {"replicas": 2}),
        ("not sharded, 2 replicas", {"ranks": 1, "replicas": 2}),
        ("2 ranks, offloaded", {"offload": True}),
        ("2 ranks, 2 replicas, offloaded", {"replicas": 2, "offload": True}),
    ]
    if reduce_dtype:
        bf16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        cases.append(("2 ranks, in bfloat16, reduced in float32", {"precision": bf16}))
    for words, settings in cases:
        with lone_unit(**settings) as lone:
            grad = torch.randn(lone.unit.layout.padded_numel).to(lone.unit.unsharded.dtype)
            grad[lone.unit.numel :] = 0
            for what, value in _reduced(lone, grad):
                yield f"{what}, {words}", value


@check("reduce.1", because=_mean)
def one_unit_alone() -> Iterator[Any]:
    yield from _alone(reduce_dtype=True)


@check("reduce.1", because=_mean)
def as_one_collective() -> Iterator[Any]:
    from minifsdp.core.reduce import AllReduce
    from tests.lone_unit import lone_unit

    for replicas in (2, 3):
        with lone_unit(ranks=1, replicas=replicas) as lone:
            stage = AllReduce("reduce")
            grad = torch.randn(lone.unit.layout.padded_numel)
            value, finish = stage.launch(lone.unit, grad)
            words = f"{replicas} replicas, which all-reduce as GPUs do"
            yield f"the stream of the stage, {words}", stage.stream
            yield f"the gradient is reduced in place, {words}", value is grad
            yield f"passed at once, {words}", not value.isnan().any()
            finish()
            yield f"collectives, {words}", lone.unit.replicate_group.called
            yield f"gradient, {words}", value


@check("reduce.1", because=_mean)
def on_a_gpu() -> Iterator[Any]:
    from minifsdp import MixedPrecision, ShardingStrategy
    from tutorials.exercises.virtual import train

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        gpu = train(sharding_strategy=strategy, hardware={"gpus_per_node": 2})
        yield f"races in a step with {strategy.name}", [str(race) for race in gpu.races()][:1]
        figures = gpu.report()
        yield at_most(f"seconds of a step with {strategy.name}", figures["step"], slack=0.02)
    cast = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    gpu = train(mixed_precision=cast)
    yield "races in a step with a cast", [str(race) for race in gpu.races()][:1]


@check("reduce.1", ranks=2, because=_mean)
def two_ranks_train() -> Iterator[Any]:
    from minifsdp import ShardingStrategy
    from tutorials.exercises import parallel

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        yield from parallel.train(sharding_strategy=strategy)


def _stored(what: str, want: Any, got: Any) -> str | None:
    if "object" in what:
        return "add in place: an optimizer or a user may hold the tensor that is there"
    if "second backward" in what:
        return "gradients add up until zero_grad(), so this one is added to the one before"
    if "size" in what:
        return "the result has padding at its end, which is no gradient of anything"
    if "dtype" in what:
        return "the gradient has the dtype shard.grad_dtype, whatever it was reduced in"
    return None


@check("reduce.2", because=_stored)
def gradients_add_up() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.core.reduce import Reduction, store_gradient
    from tests.lone_unit import lone_unit

    for rank in (0, 2):
        with lone_unit(rank, 3) as lone:
            unit = lone.unit
            result = torch.randn(unit.padded_shard.numel())
            store_gradient(Reduction(unit, result, lone.streams))
            grad = unit.sharded_flat_param.grad
            yield f"size of the gradient, rank {rank} of 3", grad.numel()
            yield f"gradient, rank {rank} of 3", grad
            store_gradient(Reduction(unit, torch.randn_like(result), lone.streams))
            total = unit.sharded_flat_param.grad
            yield f"gradient after a second backward, rank {rank} of 3", total
            yield "the gradient is the same object after a second backward", total is grad
    with lone_unit(precision=MixedPrecision(torch.bfloat16)) as lone:
        result = torch.randn(lone.unit.padded_shard.numel()).bfloat16()
        store_gradient(Reduction(lone.unit, result, lone.streams))
        yield "dtype of a gradient that was reduced in bfloat16", lone.unit.sharded_flat_param.grad


def _parts(what: str, want: Any, got: Any) -> str | None:
    if "passed" in what and want is True:
        return "the computation has to wait for the first stage, before the next reduction starts"
    if "passed" in what:
        return "the next stage has to be started, and not waited for: the computation hides it"
    if "collectives" in what or "gradient" in what or "advance()" in what:
        return (
            "after the first stage every other one has to be started, each when the one before is "
            "complete, one with each advance()"
        )
    if "the host waits" in what:
        return "let the compute stream wait, and not the host: event.wait(), not synchronize()"
    if "sent" in what:
        return "when the first stage is complete, what was sent can go: self.sent = None"
    if "races" in what:
        return (
            "a stage reads what is not written yet, or memory that was given to another tensor: "
            "its stream has to wait for self.event, and the computation for what is sent"
        )
    return _mean(what, want, got)


@check("reduce.3", because=_parts)
def parts_follow_each_other() -> Iterator[Any]:
    from minifsdp.core.reduce import Reduction
    from tests.lone_unit import lone_unit

    yield from _alone(reduce_dtype=True)
    with lone_unit(replicas=2) as lone:
        reduction = Reduction(lone.unit, torch.ones(lone.unit.layout.padded_numel), lone.streams)
        reduction.start()
        reduction.advance()
        yield "what was sent is kept after the first stage", reduction.sent is not None


@check("reduce.3", because=_parts)
def hybrid_on_a_gpu() -> Iterator[Any]:
    from minifsdp import CPUOffload, ShardingStrategy
    from tutorials.exercises.virtual import train

    hybrid = ShardingStrategy.HYBRID_SHARD
    for offload in (None, CPUOffload(True)):
        hardware = {"gpus_per_node": 2}
        gpu = train(sharding_strategy=hybrid, cpu_offload=offload, hardware=hardware)
        words = "with offload" if offload else "without offload"
        yield f"races in a hybrid step {words}", [str(race) for race in gpu.races()][:1]
        if offload is None:  # else the host has to wait for what is on its way to it
            stalls = gpu.report()["other host stalls"]
            yield at_most("seconds in which the host waits in a hybrid step", stalls, slack=0.02)
        yield at_most(f"seconds of a hybrid step {words}", gpu.report()["step"], slack=0.02)

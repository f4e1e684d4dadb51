"""Checks of between_steps/clip_grad.py: a unit that is not sharded, and two and four ranks."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import ratio
from tutorials.exercises.observe import close, refused

P = {"2": 2.0, "1": 1.0, "3": 3.0, "inf": math.inf}


def _clipped(what: str, want: Any, got: Any) -> str | None:
    if what.startswith("refused"):
        if got != "no exception":
            return "another exception is raised than the docstring says"
        if "no_sync" in what:
            return (
                "gradients from no_sync() are not part of the sum yet, so that there is no norm: "
                "refuse units that have an unreduced gradient"
            )
        return "the p of a norm has to be positive"
    if "cleared" in what:
        return "zero_grad() has cleared what no_sync had left: check_unreduced_grad() drops it"
    if "NaN" in what or "infinite" in what:
        return "what is not finite has to be seen in the norm; a maximum may ignore NaN"
    if "ignored" in what:
        return (
            "parameters that are ignored count, too, and are scaled. Each rank has them whole: the "
            "powers of their norms count as their mean over the ranks"
        )
    if "dtype" in what and "fp64" in what:
        return "the norm is in fp64 if a unit is"
    if "dtype" in what:
        return "the norm is in fp32 at least: low precision cannot add up so many squares"
    if isinstance(got, dict) and "raised" in got:
        return None
    factor = ratio(want, got)
    if what.startswith("the norm") and "ranks" in what and not bool(torch.as_tensor(got).any()):
        return "the norm is of a part only: add up over all ranks that have a part"
    if "below the limit" in what and factor is not None:
        return "gradients with a norm below max_norm stay as they are: the scale is at most 1"
    if what.startswith("the norm") and "inf" in what and factor is not None:
        if factor < 1:
            return "with p = inf it is the largest over all units and all ranks"
        return "with p = inf norms are compared, and not added up"
    if what.startswith("the norm") and factor is not None:
        if factor > 1 and "replicas" in what:
            return "the norm counts replicas more than once: what several ranks have alike"
        if factor > 1 and "chunks" in what:
            return "something counts more than once: add up powers of norms, and not norms"
        if factor < 1 and "ranks" in what:
            return "the norm is of a part only: add up over all ranks that have a part"
        return "norm^p is the sum of the units' norms to the power p; and at the end comes the root"
    if what.startswith("gradients"):
        if factor is not None:
            return (
                f"the scale is {factor:g} x what it should be: it is max_norm / norm, with the "
                "norm of all units and ranks"
            )
        return "all gradients are scaled by the same factor, in place"
    return None


def _fill(units: list[Any]) -> None:
    for unit in units:
        shard = unit.sharded_flat_param
        shard.grad = torch.randint(1, 9, (shard.numel(),)).to(shard.dtype)


@check("clip_grad.1", because=_clipped)
def the_norm_of_several_units() -> Iterator[Any]:
    from minifsdp.between_steps.clip_grad import clip_grad_norm
    from tests.lone_unit import lone_unit

    with ExitStack() as stack:
        units = [stack.enter_context(lone_unit(ranks=1)).unit for _ in range(3)]
        without = stack.enter_context(lone_unit(ranks=1)).unit  # a gradient
        for said, p in P.items():
            for max_norm, limit in ((0.5, "above the limit"), (1e6, "below the limit")):
                _fill(units)
                norm = clip_grad_norm([*units, without], max_norm, p)
                yield close(f"the norm of three units, p = {said}", norm)
                for at, unit in enumerate(units):
                    yield close(
                        f"gradients of unit {at}, {limit}, p = {said}", unit.sharded_flat_param.grad
                    )
        yield "the norm without any gradient", clip_grad_norm([without], 1.0, 2.0)
        empty = stack.enter_context(lone_unit(ranks=1)).unit
        empty.sharded_flat_param.data = torch.empty(0)
        for said, p in P.items():
            _fill([*units, empty])
            norm = clip_grad_norm([*units, empty], 1.0, p)
            yield close(f"the norm with a unit that has no elements here, p = {said}", norm)
        for value in (math.inf, math.nan):
            for said, p in P.items():
                _fill(units)
                units[1].sharded_flat_param.grad[0] = value
                kind = "infinite" if math.isinf(value) else "NaN"
                norm = clip_grad_norm(units, 1.0, p)
                yield (
                    f"whether the norm is finite where a gradient is {kind}, p = {said}",
                    bool(norm.isfinite()),
                )


@check("clip_grad.1", because=_clipped)
def what_is_refused() -> Iterator[Any]:
    from minifsdp.between_steps.clip_grad import clip_grad_norm
    from minifsdp.no_sync import store_unreduced
    from tests.lone_unit import lone_unit

    with ExitStack() as stack:
        units = [stack.enter_context(lone_unit(ranks=1)).unit for _ in range(2)]
        for p in (0.0, -1.0, math.nan):
            yield f"refused, p = {p}", refused(lambda p=p: clip_grad_norm(units, 1.0, p))
        store_unreduced(units[1], torch.ones(10))
        yield (
            "refused, a gradient that waits in no_sync",
            refused(lambda: clip_grad_norm(units, 1.0, 2.0)),
        )
        units[1].sharded_flat_param.grad = None  # zero_grad()
        yield "the norm when no_sync's was cleared", clip_grad_norm(units, 1.0, 2.0)


def _on_ranks(model: Any, said: str) -> Iterator[Any]:
    from tutorials.exercises.exact import batch

    for name in ("2", "inf"):
        p = P[name]
        for max_norm, limit in ((0.5, "above the limit"), (1e6, "below the limit")):
            model.zero_grad()
            model(batch()).sum().backward()
            yield close(f"the norm {said}, p = {name}", model.clip_grad_norm_(max_norm, p))
            grads = [param.grad for param in model.parameters()]
            for at, grad in enumerate(grads):
                yield close(f"gradients of unit {at} {said}, {limit}, p = {name}", grad)


@check("clip_grad.1", ranks=2, because=_clipped)
def every_strategy_on_two_ranks() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import CustomPolicy, ShardingStrategy
    from tutorials.exercises.exact import Layer, wrapped

    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    mesh = init_device_mesh("cpu", (2, 1))
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    mixed = CustomPolicy(lambda m: whole if isinstance(m, Layer) else False)
    yield from _on_ranks(wrapped(), "of chunks on two ranks")
    yield from _on_ranks(wrapped(**whole), "of replicas on two ranks")
    yield from _on_ranks(wrapped(**hybrid), "of hybrid replicas on two ranks")
    yield from _on_ranks(wrapped(auto_wrap_policy=mixed), "of replicas in chunks on two ranks")
    yield from _ignored_on_two_ranks()
    for p in ("2", "inf"):
        model = wrapped()
        for param in model.parameters():
            param.grad = torch.full_like(param, math.nan if dist.get_rank() else 1.0)
        norm = model.clip_grad_norm_(1.0, P[p])
        what = f"whether the norm is finite where one rank's gradients are NaN, p = {p}"
        yield what, bool(norm.isfinite())
    low = wrapped().to(torch.bfloat16)
    for param in low.parameters():
        param.grad = torch.full_like(param, 1 + 2**-7)
    yield "the dtype of the norm of bf16 gradients", low.clip_grad_norm_(1.0).dtype
    high = wrapped().double()
    yield "the dtype of the norm of fp64 gradients", high.clip_grad_norm_(1.0).dtype


def _ignored_on_two_ranks() -> Iterator[Any]:
    from minifsdp.between_steps.clip_grad import clip_grad_norm
    from tutorials.exercises.exact import wrapped

    units = wrapped().engine.units
    alone = torch.nn.Parameter(torch.zeros(3))
    for name in ("2", "inf"):
        for unit in units:
            unit.sharded_flat_param.grad = torch.ones_like(unit.sharded_flat_param)
        alone.grad = torch.full((3,), 8.0)
        norm = clip_grad_norm(units, 1.0, P[name], [alone])
        yield close(f"the norm with an ignored parameter, p = {name}", norm)
        yield close(f"gradients of an ignored parameter, p = {name}", alone.grad)


@check("clip_grad.1", ranks=4, because=_clipped)
def a_grid_of_four_ranks() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import ShardingStrategy
    from tutorials.exercises.exact import wrapped

    mesh = init_device_mesh("cpu", (2, 2))
    model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    yield from _on_ranks(model, "of replicas on a grid of four ranks")

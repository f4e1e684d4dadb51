"""Checks of no_sync.py: one unit without other ranks, a virtual GPU, and two ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import ratio
from tutorials.exercises.observe import at_most, refused


def _left(unit: Any) -> torch.Tensor | None:
    """What no_sync has left of a unit."""
    return None if unit.unreduced_grad is None else unit.unreduced_grad.grad


def _grad() -> torch.Tensor:
    return torch.randint(1, 9, (10,)).float()


def _kept(what: str, want: Any, got: Any) -> str | None:
    if "no elements" in what and isinstance(got, dict):
        return "a rank may have no elements of a unit (its chunk is padding): the mark is empty"
    if what.startswith("left") and want is None:
        return "a zero_grad() clears this gradient, too, with set_to_none=True or False"
    if what.startswith("left") and got is None:
        return "it was dropped, though nobody has called zero_grad()"
    if "float64" in what:
        return "unit.unreduced_dtype, if it is not None, is the dtype to keep a gradient in"
    if what.startswith("left after two"):
        return "the second gradient is added to the first, and does not replace it"
    if what.startswith("shard.grad"):
        if got is None:
            return "the mark that zero_grad() clears is shard.grad: set it to zeros if it is None"
        return (
            "the mark, shard.grad, is in the shard's shape: zeros if it was None, and what was "
            "reduced before keeps its values"
        )
    if "after zero_grad" in what:
        return "a zero_grad() with set_to_none=False leaves zeros: that is no error"
    if "scaled" in what and "zeros" in what:
        return (
            "zeros that are scaled stay zeros, and look as if they were cleared. A -0.0 in the "
            "mark stays -0.0 when it is scaled, and is 0.0 when it is cleared"
        )
    if "parameters" in what and got == "no exception":
        return "a step with a part of the gradient goes unnoticed: compare shard._version, too"
    if "of an optimizer" in what and got == "no exception":
        return (
            "the optimizer has to be stopped before it steps: add the unit to _units, and call "
            "_watch_optimizers()"
        )
    if "nothing has happened" in what:
        return "nothing was changed or cleared, so the check has nothing to say"
    if got == "no exception":
        return "the gradient was changed while a part of it was not reduced: that is an error"
    if what.startswith("bytes sent"):
        return "nothing is sent in no_sync()"
    if "allocated" in what:
        return "one gradient is kept for each unit: add the new one to the old one in place"
    if (factor := ratio(want, got)) is not None:
        return f"it is exactly {factor:g} x too large or small: are gradients added twice, or lost?"
    if what.startswith(("losses", "parameters of")):
        return "a gradient from no_sync() was lost, or counted twice"
    return None


@check("no_sync.1", because=_kept)
def kept_and_added_up() -> Iterator[Any]:
    from minifsdp.no_sync import check_unreduced_grad, store_unreduced
    from tests.lone_unit import lone_unit

    with lone_unit() as lone:
        unit, shard = lone.unit, lone.unit.sharded_flat_param
        store_unreduced(unit, _grad())
        yield "left after one backward in no_sync", _left(unit)
        yield "shard.grad meanwhile", shard.grad
        store_unreduced(unit, _grad())
        yield "left after two backwards in no_sync", _left(unit)
        yield (
            "what the check raises when nothing has happened",
            refused(lambda: check_unreduced_grad(unit)),
        )
        yield "left after a check", _left(unit)
    with lone_unit() as lone:
        unit, shard = lone.unit, lone.unit.sharded_flat_param
        yield (
            "what the check raises when nothing has happened, and nothing is left",
            refused(lambda: check_unreduced_grad(unit)),
        )
        shard.grad = torch.tensor([0.0, 3, 4, 5, 6])
        store_unreduced(unit, _grad())
        store_unreduced(unit, _grad())
        yield "shard.grad that was reduced before", shard.grad
        yield "left after two backwards beside a reduced one", _left(unit)
    with lone_unit() as lone:
        lone.unit.unreduced_dtype = torch.float64
        for _ in range(2):
            store_unreduced(lone.unit, _grad())
            yield "left where float64 is the dtype to keep it in", _left(lone.unit)
    with lone_unit(rank=7, ranks=8) as lone:
        for _ in range(2):
            store_unreduced(lone.unit, torch.ones(lone.unit.layout.padded_numel))
            check_unreduced_grad(lone.unit)
        yield "left on a rank that has no elements", _left(lone.unit)
        lone.unit.sharded_flat_param.grad = None
        check_unreduced_grad(lone.unit)
        yield "left after zero_grad() on a rank that has no elements", _left(lone.unit)


@check("no_sync.1", because=_kept)
def zero_grad_clears_it() -> Iterator[Any]:
    from minifsdp.no_sync import check_unreduced_grad, store_unreduced
    from tests.lone_unit import lone_unit

    for earlier in (None, torch.tensor([2.0, 3, 4, 5, 6])):
        for to_none in (True, False):
            with lone_unit() as lone:
                unit, shard = lone.unit, lone.unit.sharded_flat_param
                shard.grad = None if earlier is None else earlier.clone()
                optimizer = torch.optim.SGD([shard], lr=0.5)
                store_unreduced(unit, _grad())
                optimizer.zero_grad(set_to_none=to_none)
                of = f"zero_grad(set_to_none={to_none})"
                yield (
                    f"what the check raises after {of}",
                    refused(lambda u=unit: check_unreduced_grad(u)),
                )
                yield f"left after {of}", _left(unit)
                store_unreduced(unit, _grad())
                check_unreduced_grad(unit)
                yield f"left of the next backward in no_sync, after {of}", _left(unit)


CHANGES: dict[str, Callable[[Any], object]] = {
    "the gradient was scaled": lambda shard: shard.grad.mul_(0.5),
    "the gradient was replaced by another": lambda shard: setattr(shard, "grad", shard.grad / 2),
    "the gradient was added to": lambda shard: shard.grad.add_(1),
    "the parameters were changed": lambda shard: _add(shard),
}


def _add(shard: Any) -> None:
    with torch.no_grad():
        shard.add_(1)


@check("no_sync.1", because=_kept)
def changes_are_refused() -> Iterator[Any]:
    from minifsdp.no_sync import check_unreduced_grad, store_unreduced
    from tests.lone_unit import lone_unit

    for earlier in (torch.tensor([2.0, 3, 4, 5, 6]), None):
        mark = "a mark of zeros" if earlier is None else "a gradient reduced before"
        for said, change in CHANGES.items():
            with lone_unit() as lone:
                unit, shard = lone.unit, lone.unit.sharded_flat_param
                shard.grad = None if earlier is None else earlier.clone()
                store_unreduced(unit, _grad())

                def both(shard: Any = shard, unit: Any = unit, change: Any = change) -> None:
                    change(shard)
                    check_unreduced_grad(unit)

                yield f"what is raised when {said}, with {mark}", refused(both)
    with lone_unit() as lone:
        store_unreduced(lone.unit, _grad())
        optimizer = torch.optim.SGD([lone.unit.sharded_flat_param], lr=0.5)
        yield "what the step of an optimizer raises", refused(optimizer.step)
        optimizer.zero_grad()
        lone.unit.sharded_flat_param.grad = None
        yield "what its step raises after zero_grad()", refused(optimizer.step)


@check("no_sync.1", because=_kept)
def accumulation_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    def accumulated(model: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with model.no_sync():
                model(x).mean().backward()
        return model(x).mean()

    gpu = train(loss=accumulated)
    figures = gpu.report()
    yield at_most(
        "bytes sent in a step with two of three backwards in no_sync", figures["bytes sent"]
    )
    # Less than one more gradient for each unit; one for a single unit is another way to add.
    yield at_most("allocated bytes of such a step", figures["peak allocated"], slack=0.1)
    yield "missing waits", [str(race) for race in gpu.races()[:1]]


@check("no_sync.1", ranks=2, because=_kept)
def accumulation_on_two_ranks() -> Iterator[Any]:
    from minifsdp import ShardingStrategy
    from tutorials.exercises.exact import batch, train, wrapped

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for pattern in ("ws", "wws", "sws"):
            model = wrapped(sharding_strategy=strategy)
            of = f"of {strategy.name}, backwards {pattern} (w: in no_sync)"
            yield f"losses {of}", train(model, pattern)
            with model.no_sync():
                model(batch()).sum().backward()
            model.zero_grad()
            yield f"losses {of}, after zero_grad()", train(model, pattern, steps=1)
            yield f"parameters {of}", model.state_dict()

"""Checks of FeaturedFlatParam.release: one unit, and what users may have kept of it."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check


def _kept(what: str, want: Any, got: Any) -> str | None:
    if "bytes" in what:
        return "nobody else refers to the memory, so it can be freed: storage.resize_(0)"
    if "that was kept" in what:
        return (
            "the memory was freed though a view of it was kept. Its reader would get garbage or "
            "crash; leave the memory to it, and take a new storage for flat_param and data"
        )
    if "says" in what:
        return "True if the memory is free now, False if somebody has kept it"
    if "next step" in what:
        return "flat_param and data need the same new memory, and self.storage has to be that"
    return None


@check("unsharded_storage.1", because=_kept)
def what_was_kept_keeps_its_values() -> Iterator[Any]:
    from minifsdp.core.views import make_views
    from tests.lone_unit import lone_unit

    for keeps in ("nothing", "a parameter", "a slice of one", "the result of detach()"):
        with lone_unit() as lone:
            unit = lone.unit
            lone.fill()
            make_views(unit)
            kept: Any = {
                "nothing": lambda unit: None,
                "a parameter": lambda unit: unit.views[0],
                "a slice of one": lambda unit: unit.views[0][1:],
                "the result of detach()": lambda unit: unit.views[2].detach(),
            }[keeps](unit)
            flat = unit.unsharded.flat_param
            free = unit.unsharded.release(unit.views)
            yield f"bytes that the unit has then, when the user keeps {keeps}", lone.memory
            if kept is not None:
                bytes_there = kept.untyped_storage().size()
                yield f"size of the storage of {keeps} that was kept", bytes_there
                yield f"values of {keeps} that was kept", kept if bytes_there else "no memory"
            yield f"release() says, when the user keeps {keeps}", bool(free)
            yield "the same tensor in the next step", unit.unsharded.flat_param is flat
            unit.unsharded.allocate()
            unit.unsharded.data.fill_(3)
            yield f"values in the next step, after {keeps} was kept", unit.unsharded.flat_param
            if kept is not None and bytes_there:
                yield f"values of {keeps} that was kept, after the next gather", kept
            del kept


@check("unsharded_storage.1", ranks=2, because=_kept)
def a_model_whose_parameter_is_kept() -> Iterator[Any]:
    import warnings

    from tutorials.exercises import parallel

    warnings.simplefilter("ignore")
    kept: list[torch.Tensor] = []

    def backward(model: torch.nn.Module, step: int) -> float:
        block = next(m for m in model.modules() if isinstance(m, parallel.Block))
        hook = block.linear.register_forward_hook(
            lambda module, args, output: kept.append(module.weight)
        )
        loss = parallel.one_backward(model, step)
        hook.remove()
        return loss

    yield from parallel.train(backward=backward)
    if not any(weight.untyped_storage().size() for weight in kept):
        yield "a parameter that was kept", "no memory"
    else:
        yield "a parameter that was kept", "has memory"

"""Checks of FeaturedFlatParam.release: one unit, and what users may have kept of it."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check


def _kept(what: str, want: Any, got: Any) -> str | None:
    if "bytes" in what and "nothing" in what:
        return "nobody else refers to the memory, so it can be freed: storage.resize_(0)"
    if "bytes" in what:
        return (
            "what was kept has the old memory. The unit has new memory now, which it does not need "
            "before the next gather: free that"
        )
    if "that was kept" in what:
        return (
            "the memory was freed though a view of it was kept. Its reader would get garbage or "
            "crash; leave the memory to it, and take a new storage for flat_param and data"
        )
    if "says" in what and "frozen in part" in what:
        return "of a unit that is frozen in part, `frozen` refers to the memory, too"
    if "says" in what:
        return "True if the memory is free now, False if somebody has kept it"
    if "frozen part" in what:
        return "`frozen` is in the same memory as `flat_param`, behind it, and goes where that goes"
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


@check("unsharded_storage.1", because=_kept)
def a_unit_that_is_frozen_in_part() -> Iterator[Any]:
    from minifsdp.rows import Rows
    from minifsdp.support.unsharded_storage import UnshardedFlatParams

    layout = Rows([torch.Size([3]), torch.Size([2])], [True, False], 1)
    for keeps in ("nothing", "a parameter"):
        made, memory = UnshardedFlatParams(lambda: None), torch.zeros(layout.padded_numel)
        unsharded: Any = made.add(memory, True, True, layout)
        del memory  # else somebody refers to it
        unsharded.allocate()
        views = layout.unflatten(unsharded.flat_param, unsharded.frozen)
        kept = views[1] if keeps == "a parameter" else None
        free = unsharded.release(views)
        yield f"release() of a unit frozen in part says, when the user keeps {keeps}", bool(free)
        del kept, views
        unsharded.allocate()
        unsharded.data.fill_(3)
        has_memory = unsharded.frozen.untyped_storage().size()
        values = unsharded.frozen if has_memory else "no memory"
        yield f"values of the frozen part in the next step, after {keeps} was kept", values


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

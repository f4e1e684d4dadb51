"""Checks of hooks.py: a frozen unit by itself, on a virtual GPU, and on two ranks."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _frozen(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "raised" in got:
        return "inputs may be nested, may be no tensors, and may need no gradient (tensors_in)"
    if "the nested one last" in what:
        return "an input that is nested, in args or kwargs, has its gradient later (tensors_in)"
    if "of two inputs" in what:
        return "it is freed too early: the gradient of another input is computed with it still"
    if "before the backward" in what:
        return "it is freed at once: its backward still needs the parameters"
    if "loss does not use one" in what:
        return (
            "an input that the loss does not use never gets a gradient: wait for those that will "
            "get one (after_gradients_of), and free the unit then"
        )
    if "the state" in what and "its strategy" in str(got):
        return (
            "a strategy keeps a unit from its forward to its backward, which is over: let go of "
            "STRATEGY as well, or else the unit stays until the whole backward has ended"
        )
    if "that is held for" in what and "its backward" not in str(got):
        return (
            "let go of BACKWARD and STRATEGY only (unit.let_go): the unit is also held for "
            "no_sync, which keeps it for the next forward, and parameters.reshard() would free it "
            "in any case"
        )
    if "the state" in what and str(got).startswith("UNSHARDED"):
        return (
            "frozen units are kept until the end of the whole backward: they have no gradient of "
            "their own, so free each when its inputs have theirs. (after_gradients_of() does "
            "nothing if one of several is a leaf: give it only those that require a gradient)"
        )
    if "the state" in what:
        return (
            "the unit has had its turn when its inputs have their gradients: free it, and say so "
            "in its state (complete_grad), or else it could be prefetched again"
        )
    if "sent" in what or "seconds" in what:
        return "units are gathered again that have had their turn: complete_grad() says so"
    if "memory" in what or "peak" in what:
        return (
            "frozen units are kept until the end of the whole backward: they have no gradient of "
            "their own, so free each when its inputs have theirs"
        )
    return None


@check("hooks.1", because=_frozen)
def a_frozen_unit_is_freed_with_its_last_input() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.hooks import Hooks
    from tutorials.exercises.watching import gathered_for_backward, has_memory, state, two_units

    for unused, nested in ((False, "first"), (True, "first"), (False, "last")):
        with two_units() as (engine, now, _):
            hooks = Hooks(Backward(engine))
            gathered_for_backward(now)
            leaves = [torch.rand(2, requires_grad=True) for _ in range(2)]
            inputs = [leaf.clone() for leaf in leaves]  # the second one gets its gradient first
            first, second = inputs if nested == "first" else inputs[::-1]
            others = [torch.ones(2), torch.rand(2, requires_grad=True).clone()][: 1 + unused]
            hooks._free_when_inputs_have_gradients(
                now.unit, (first, {"mask": None, "more": others}), {"second": [second, "text"]}
            )
            yield "whether a frozen unit has memory before the backward", has_memory(now)
            found: dict[str, bool] = {}
            leaves[1].register_hook(lambda grad, f=found, now=now: f.update(one=has_memory(now)))
            ((inputs[0] * 2).sum() + (inputs[1] * 3).sum()).backward()
            yield (
                f"whether it has memory when one of two inputs has its gradient, the nested one "
                f"{nested}",
                found["one"],
            )
            name = ", of which the loss does not use one" if unused else ""
            yield f"the state when all inputs have theirs{name}", state(now)


@check("hooks.1", because=_frozen)
def a_frozen_unit_with_other_reasons_to_stay() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.hooks import Hooks
    from minifsdp.core.unit_state import STRATEGY
    from minifsdp.no_sync import NO_SYNC
    from tutorials.exercises.watching import gathered_for_backward, state, two_units

    for reason, name in (
        (STRATEGY, "that its strategy has kept for its backward"),
        (NO_SYNC, "that is held for no_sync as well"),
    ):
        with two_units() as (engine, now, _):
            now.unit.reshard_after_forward = False
            gathered_for_backward(now, reason)
            x = torch.ones(2, requires_grad=True)
            first = x.clone()
            Hooks(Backward(engine))._free_when_inputs_have_gradients(now.unit, (first,), {})
            (2 * first).sum().backward()
            yield f"the state of a unit {name}, when its input has its gradient", state(now)


@check("hooks.1", because=_frozen)
def inputs_without_gradients() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.hooks import Hooks
    from tutorials.exercises.watching import gathered_for_backward, has_memory, two_units

    for args in ((), (torch.ones(2), "text", None)):
        with two_units() as (engine, now, _):
            hooks = Hooks(Backward(engine))
            gathered_for_backward(now)
            hooks._free_when_inputs_have_gradients(now.unit, args, {})
            yield (
                f"whether it has memory before the backward, with {len(args)} inputs",
                has_memory(now),
            )


@check("hooks.1", because=_frozen)
def frozen_units_on_a_gpu() -> Iterator[Any]:
    from minifsdp import BackwardPrefetch
    from tutorials.exercises.virtual import train

    def loss(model: Any, x: Any) -> Any:
        for block in list(model.module)[1:]:
            block.requires_grad_(False)
        return model(x).mean()

    for setting in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        name = setting.name if setting else "no prefetch"
        figures = train([1024] * 6, loss=loss, backward_prefetch=setting).report()
        yield at_most(f"peak unsharded units, {name}", figures["peak unsharded units"])
        yield at_most(f"bytes sent in a step, {name}", figures["bytes sent"])
        yield at_most(f"seconds of a step, {name}", figures["step"], slack=0.02)


@check("hooks.1", ranks=2, because=_frozen)
def frozen_units_on_two_ranks() -> Iterator[Any]:
    from tests.small import storage
    from tutorials.exercises.watching import Nested, batch, squares, stack, trained, wrapped

    plain = stack()
    for block in plain[2:]:
        block.requires_grad_(False)
    model, seen = wrapped(plain), []

    def note(*_: object) -> None:
        seen.append([unit.name or "root" for unit in model.engine.units if storage(unit)])

    model.module[1].module[0].register_full_backward_hook(note)
    squares(model, batch(0)).backward()
    yield "units that have memory in the backward of unit 1; 2 and 3 are frozen", seen
    nested = Nested()
    nested.stage.requires_grad_(False)
    yield from trained(wrapped(nested), 2)
    nested = Nested()
    nested.twice.requires_grad_(False)
    yield from trained(wrapped(nested), 2)

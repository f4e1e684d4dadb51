"""Checks of backward.py: a unit in a unit, in a backward, on a virtual GPU, and on two ranks."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _entry(what: str, want: Any, got: Any) -> str | None:
    if isinstance(got, dict) and "raised" in got:
        if got["raised"] == "AssertionError":
            return "a unit enters its backward once: _begin_backward sees to that; use it"
        return (
            "autograd computes with parameters that are not there: is each unit of the chain "
            "gathered, and the backward begun (self.begin)"
        )
    if "the call that began" in what and got == []:
        return "begin() asks autograd for a call at its end, so every backward has to begin"
    if "the call that began" in what:
        return "a gradient has come first to the last of the calls: begin with that one"
    if "was over" in what:
        return (
            "a unit around it whose backward is over (POST_BACKWARD) is not gathered again: "
            "nothing would free it before the end"
        )
    if "used again" in what:
        return (
            "the unit itself has to be gathered whatever its state is: it may be used twice, and "
            "its parameters were freed in between"
        )
    if "outer" in what:
        return (
            "the outer unit's own layers may come before the inner unit, so they are in this "
            "backward too: gather the units around it as well, outermost first"
        )
    if "running" in what or "end" in what:
        return "nobody knows of this backward: begin() asks autograd for a call at its end"
    if "inner" in what:
        return "a gradient has reached the unit, so its parameters are needed now"
    if "gradient" in what and got is None:
        return "no gradient was reduced: its unit never entered the backward"
    if "memory" in what or "seconds" in what or "peak" in what or "sent" in what:
        return "units are gathered that are not needed, or are gathered too often"
    return None


@check("backward.1", because=_entry)
def a_gradient_enters_an_inner_unit() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.layers import Call
    from tutorials.exercises.watching import state, two_units

    for outer_is_over, used_again in ((False, False), (True, False), (False, True)):
        with two_units() as (engine, inner, outer):
            for lone in (inner, outer):
                engine.before_forward(lone.unit, prefetch=False)
                engine.after_forward(lone.unit, prefetch=False)
            backward = Backward(engine)
            engine.prefetcher.target = None  # type: ignore[attr-defined]
            calls = tuple(Call(u, u.module, False, False) for u in (outer.unit, inner.unit))
            found: dict[str, Any] = {}

            def enter(
                grad: Any,
                inner: Any = inner,
                outer: Any = outer,
                backward: Any = backward,
                calls: Any = calls,
                found: dict[str, Any] = found,
                over: bool = outer_is_over,
                again: bool = used_again,
            ) -> None:
                backward.begin()
                for lone, is_over in ((outer, over), (inner, again)):
                    if is_over:
                        lone.unit.state.complete_grad()
                backward.before_backward(calls)
                backward.before_backward(calls)  # another output of the same forward
                found.update(inner=state(inner), outer=state(outer))

            x = torch.ones(2, requires_grad=True)
            x.register_hook(enter)
            (2 * x).sum().backward()
            name = "whose backward was over" if outer_is_over else "that is used again"
            name = f"{name} in this backward" if outer_is_over or used_again else ""
            yield f"the outer unit {name * outer_is_over}".strip(), found.get("outer")
            yield f"the inner unit {name * used_again}".strip(), found.get("inner")
            yield "whether both are freed at the end", [state(inner), state(outer)]


@check("backward.1", because=_entry)
def outer_units_enter_before_inner_ones() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.layers import Call
    from tutorials.exercises.watching import two_units

    with two_units() as (engine, inner, outer):
        chain, order = [engine.root, outer.unit, inner.unit], []
        for unit in chain:
            engine.before_forward(unit, prefetch=False)
            engine.after_forward(unit, prefetch=False)
        backward, before_backward = Backward(engine), engine.before_backward
        engine.prefetcher.target = None  # type: ignore[attr-defined]

        def noted(unit: Any, *args: Any) -> None:
            order.append(chain.index(unit))
            before_backward(unit, *args)

        engine.before_backward = noted  # type: ignore[method-assign]
        calls = tuple(Call(u, u.module, False, False) for u in chain)
        start_backward, first = engine.start_backward, []

        def started(call: Call | None) -> None:
            first.append(call and calls.index(call))
            start_backward(call)

        engine.start_backward = started  # type: ignore[method-assign]
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: backward.before_backward(calls))
        (2 * x).sum().backward()
        yield "the order in which units enter the backward, 0 being the outermost", order
        yield "the call that began the backward, 0 being the outermost", first


@check("backward.1", because=_entry)
def a_backward_begins_with_its_first_unit() -> Iterator[Any]:
    import torch

    from minifsdp.core.backward import Backward
    from minifsdp.core.layers import Call
    from tutorials.exercises.watching import two_units

    with two_units() as (engine, now, _):
        engine.before_forward(now.unit, prefetch=False)
        engine.after_forward(now.unit, prefetch=False)
        backward, found = Backward(engine), []
        engine.prefetcher.target = None  # type: ignore[attr-defined]
        call = Call(now.unit, now.unit.module, in_order=True, outermost=True)

        def enter(grad: Any) -> None:
            backward.before_backward((call,))
            found.append(backward.running)

        x = torch.ones(2, requires_grad=True)
        x.register_hook(enter)
        (2 * x).sum().backward()
        yield "whether a backward is running from its first unit on, and after its end", [
            *found, backward.running
        ]  # fmt: skip


@check("backward.1", because=_entry)
def backwards_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    figures = train([1024] * 5).report()
    yield at_most("peak unsharded units on a GPU", figures["peak unsharded units"])
    yield at_most("bytes sent in a step on a GPU", figures["bytes sent"])
    yield at_most("seconds of a step on a GPU", figures["step"], slack=0.02)


@check("backward.1", ranks=2, because=_entry)
def losses_from_parts_of_a_model_on_two_ranks() -> Iterator[Any]:
    from tutorials.exercises.watching import Inside, Nested, trained, wrapped

    yield from trained(wrapped(Nested()), 2)
    yield from trained(wrapped(Nested()), 2, lambda m, x: (m(x), m.kept.pow(2).sum())[1])
    model = wrapped(Inside())
    yield from trained(model, 2, lambda m, x: (m(x), m.module.stage.kept.pow(2).sum())[1])
    # Of the outer unit: how many units were gathered for that.
    yield at_most(
        "gathers of units that are inside of an outer one", model.engine.stats.all_gathers
    )

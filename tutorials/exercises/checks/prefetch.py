"""Checks of prefetch.py: with units that have names only, on a virtual GPU, and on two ranks.

On a virtual GPU and on ranks what is seen is one line: "+2 1" says that the all-gather of unit 2
was started before unit 1 computed, so that it is hidden behind this computation.
"""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_most


def _raised(got: Any) -> bool:
    return isinstance(got, dict) and "raised" in got


def _order(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "before any pass" in what or "end of" in what:
        return "where the last pass has nothing more, there is no target: None"
    if "twice" in what or "several times" in what:
        return (
            "a unit may come several times, and each time something else follows: look from the "
            "current position on first"
        )
    if "unknown" in what:
        return "a unit that the last pass does not have tells nothing: None, and keep the position"
    if "back" in what:
        return "if the unit is not in the rest of the last pass, look for it from its start"
    if "broke off" in what:
        return "a pass that broke off is dropped by forget(), and the last complete one is kept"
    if "no visits" in what:
        return "a pass without visits is no order: keep the last one"
    if "new pass" in what:
        return "a new pass begins at its first unit again, and has the order before as its last"
    if "GPU" in what or "rank" in what:
        return "targets are found late or not at all, so gathers are not hidden"
    if isinstance(want, list) and isinstance(got, list) and got and got == [None] * len(got):
        return "nothing is ever found: start() has to keep the order of the pass before"
    if isinstance(want, list) and isinstance(got, list):
        return "the unit that came after this one in the last pass is asked for"
    return None


class _ByName:
    """An order of units that are called by their names."""

    def __init__(self, units: str = "") -> None:
        from minifsdp.core.prefetch import Order
        from tests.core.common import StubUnit

        self.order: Any = Order()
        self.units = {name: StubUnit(name) for name in "abcdx"}
        if units:
            self.visit(units)
            self.order.start()

    def visit(self, names: str) -> list[str | None]:
        return [self._name(self.order.visit(self.units[name])) for name in names]

    def upcoming(self) -> str | None:
        return self._name(self.order.upcoming())

    def last_and_current(self) -> list[str]:
        return ["".join(u.label for u in units) for units in (self.order.last, self.order.current)]

    @staticmethod
    def _name(unit: Any) -> str | None:
        return None if unit is None else unit.label


@check("prefetch.1", because=_order)
def what_came_next_in_the_last_pass() -> Iterator[Any]:
    named = _ByName()
    yield "upcoming() before any pass", named.upcoming()
    yield "visit of a, b, c in the first pass", named.visit("abc")
    yield "last and current, after a, b, c", named.last_and_current()
    named.order.start()
    yield "last and current of a new pass", named.last_and_current()
    yield "upcoming() of a new pass", named.upcoming()
    yield "visit of a, b", named.visit("ab")
    yield "upcoming() after b", named.upcoming()
    yield "visit of c, the end of the last pass", named.visit("c")
    yield "upcoming() at the end of the last pass", named.upcoming()
    named.order.start()
    yield "upcoming() of one more new pass", named.upcoming()
    yield "visit of a, b, c in one more new pass", named.visit("abc")


@check("prefetch.1", because=_order)
def passes_that_differ() -> Iterator[Any]:
    yield "visit of a, b, a, c, where a comes twice", _ByName("abac").visit("abac")
    yield "visit of a, x, c, d, where x is unknown", _ByName("abcd").visit("axcd")
    yield "visit of c, a, b, d, which goes back", _ByName("abcd").visit("cabd")


@check("prefetch.1", because=_order)
def passes_that_do_not_count() -> Iterator[Any]:
    named = _ByName("abc")
    named.order.start()
    yield "visit of a, b, after a pass with no visits", named.visit("ab")
    named.order.start()
    named.visit("b")
    named.order.forget()
    named.order.start()
    yield "visit of a, b, after a pass that broke off", named.visit("ab")


@check("prefetch.1", because=_order)
def a_gpu_with_both_prefetches() -> Iterator[Any]:
    from tutorials.exercises.virtual import train
    from tutorials.exercises.watching import turns

    for steps in (1, 3):
        gpu = train([1024] * 4, steps=steps, forward_prefetch=True)
        yield f"gathers (+) and computations on a GPU in step {steps}", turns(gpu)
        yield at_most(f"seconds on a GPU of step {steps}", gpu.report()["step"], slack=0.02)


@check("prefetch.1", ranks=2, because=_order)
def a_unit_that_is_used_twice_on_two_ranks() -> Iterator[Any]:
    from tutorials.exercises.watching import Nested, turns_on_ranks, wrapped

    model = wrapped(Nested())
    for at in range(3):
        forward, backward = turns_on_ranks(model, at)
        yield f"gathers of the forward of step {at + 1} on two ranks", forward
        yield f"gathers of the backward of step {at + 1} on two ranks", backward


def _moments(prefetcher: Any, units: Any, steps: int = 2, fork: bool = False) -> dict[str, str]:
    """The targets that a prefetcher names in the last of some steps, by moment; "-" is none, or
    the root, which is unsharded all the time."""
    root, a, b, c = units
    for _ in range(steps):
        named: dict[str, list[Any]] = {}

        def note(moment: str, target: Any, named: dict[str, list[Any]] = named) -> None:
            named.setdefault(moment, []).append(target)

        prefetcher.start_forward()
        note("before the forward of root", prefetcher.pre_forward(root))
        for unit in (a, b, c):
            note("before the forwards of a, b, c", prefetcher.pre_forward(unit))
            note("after the forwards of a, b, c", prefetcher.post_forward(unit))
        note("after the forward of root", prefetcher.post_forward(root))
        prefetcher.start_backward()
        note("before the backward of root", prefetcher.pre_backward(root))
        # With a fork the forward's order tells nothing of the backward's.
        for unit in (c, a, b) if fork else (c, b, a):
            moments = "the backwards of c, a, b" if fork else "the backwards of c, b, a"
            note("before " + moments, prefetcher.pre_backward(unit))
            note("after " + moments, prefetcher.post_backward(unit))
        note("after the backward of root", prefetcher.post_backward(root))
    return {
        moment: "".join("-" if t is None or t is root else t.label for t in targets)
        for moment, targets in named.items()
    }


def _units() -> Any:
    from tests.core.common import StubUnit

    root = StubUnit("root")
    return root, *(StubUnit(name, [root]) for name in "abc")


def _forward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "recorded" in what:
        return (
            "both orders record each unit whatever self.forward says: the first backward goes by "
            "the post-forward order"
        )
    if "a GPU" in what or "ranks" in what:
        return (
            "a gather of a forward is hidden only if its target is named one unit ahead, in the "
            "order of the last forward"
        )
    if "step 1" in what:
        return (
            "in the first step nothing is known yet; later the target is the unit that came next "
            "in the last pass, and not this one"
        )
    if set(want) == {"-"}:
        return (
            "the setting is for another moment: return a target only where self.forward says so, "
            "and record the unit in any case"
        )
    if set(got or "") == {"-"}:
        return (
            "no target is named. Either the last forward was not recorded and started anew, or "
            "the setting is for another moment: self.forward says where to return a target"
        )
    return "the target is the unit that came next in the last pass, and not this one"


@check("prefetch.2", because=_forward)
def targets_of_a_forward() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
    from minifsdp.core.prefetch import Prefetcher

    moments = {
        "FORWARD_PRE": ForwardPrefetch.FORWARD_PRE,
        "FORWARD_POST": ForwardPrefetch.FORWARD_POST,
        "no prefetch in the forward": None,
    }
    for steps in (1, 2, 3):
        for name, setting in moments.items():
            prefetcher = Prefetcher(BackwardPrefetch.BACKWARD_PRE, setting)
            found = _moments(prefetcher, _units(), steps)
            for moment in (
                "before the forward of root",
                "before the forwards of a, b, c",
                "after the forwards of a, b, c",
            ):
                yield f"{name}, targets {moment}, step {steps}", found[moment]
            orders = prefetcher.pre_forward_order, prefetcher.post_forward_order
            recorded = ["".join(u.label for u in o.current if u.ancestors) for o in orders]
            yield f"{name}, units that are recorded in both orders, step {steps}", recorded


@check("prefetch.2", because=_forward)
def forwards_on_a_gpu() -> Iterator[Any]:
    from minifsdp.core.api import ForwardPrefetch
    from tutorials.exercises.virtual import train
    from tutorials.exercises.watching import turns

    for setting in (ForwardPrefetch.FORWARD_PRE, ForwardPrefetch.FORWARD_POST, False):
        name = setting.name if setting else "no prefetch"
        for steps in (1, 3):
            gpu = train([1024] * 4, steps=steps, forward_prefetch=setting)
            yield f"{name}: gathers (+) and computations on a GPU in step {steps}", turns(gpu)


@check("prefetch.2", ranks=2, because=_forward)
def forwards_on_two_ranks() -> Iterator[Any]:
    from minifsdp.core.api import ForwardPrefetch
    from tutorials.exercises.watching import Nested, turns_on_ranks, wrapped

    for setting in (ForwardPrefetch.FORWARD_PRE, ForwardPrefetch.FORWARD_POST):
        model = wrapped(Nested(), forward_prefetch=setting)
        for at in range(3):
            forward, _ = turns_on_ranks(model, at)
            yield f"gathers of forward {at + 1} on two ranks, {setting.name}", forward


def _backward(what: str, want: Any, got: Any) -> str | None:
    if _raised(got):
        return None
    if "without parameters" in what:
        return (
            "a unit without parameters (numel is 0) prefetches nothing: ranks need not agree on "
            "whether its backward runs"
        )
    if "inner and outer" in what:
        return (
            "ask what comes after the unit whose backward began last, which may not be this one: "
            "the backward of an outer unit ends after those inside of it have begun. (In the first "
            "backward the order is the reverse of the post-forward order)"
        )
    if "first backward" in what or "step 1" in what:
        return (
            "the first backward has no order of its own; the reverse of the post-forward order of "
            "this step is used in its place"
        )
    if "recorded" in what:
        return (
            "from the second step on the backward goes by its own last order, not by the forward's"
        )
    if "outer" in what:
        return (
            "after a backward comes the unit that follows the one whose backward began last: an "
            "outer unit's backward ends after those inside of it have begun"
        )
    if "GPU" in what or "ranks" in what:
        return (
            "no gather is hidden, or another one than is needed next: the target has to be named "
            "one unit before it is needed"
        )
    if set(want) == {"-"}:
        return "the setting is for another moment: return a target only where self.backward says so"
    if set(got or "") == {"-"}:
        return (
            "no target is named. Either the last backward was not recorded, or the setting is for "
            "another moment: self.backward says where to return a target"
        )
    if got == "cba":
        return "it names the unit itself: is it recorded twice, before its backward and after it"
    return "the target is the unit that came next in the last backward"


@check("prefetch.3", because=_backward)
def targets_of_a_backward() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
    from minifsdp.core.prefetch import Prefetcher

    moments = {
        "BACKWARD_PRE": BackwardPrefetch.BACKWARD_PRE,
        "BACKWARD_POST": BackwardPrefetch.BACKWARD_POST,
        "no prefetch in the backward": None,
    }
    for steps, which in ((2, "second backward"), (3, "third backward"), (1, "first backward")):
        for name, setting in moments.items():
            prefetcher = Prefetcher(setting, ForwardPrefetch.FORWARD_PRE)
            found = _moments(prefetcher, _units(), steps)
            for moment in ("before the backward of root", "before the backwards of c, b, a"):
                yield f"{name}, targets {moment}, {which}", found[moment]
            # After the last one nothing is left to name; the step is over.
            yield (
                f"{name}, targets after the backwards of c, b, a, {which}",
                found["after the backwards of c, b, a"],
            )


@check("prefetch.3", because=_backward)
def the_backward_has_an_order_of_its_own() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch
    from minifsdp.core.prefetch import Prefetcher

    for name, setting in (
        ("before", BackwardPrefetch.BACKWARD_PRE),
        ("after", BackwardPrefetch.BACKWARD_POST),
    ):
        for steps in (2, 3):
            found = _moments(Prefetcher(setting, None), _units(), steps, fork=True)
            yield (
                f"targets {name} the backwards of c, a, b, as recorded in backward {steps - 1}",
                found[f"{name} the backwards of c, a, b"],
            )


@check("prefetch.3", because=_backward)
def units_in_units_and_units_without_parameters() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch
    from minifsdp.core.prefetch import Prefetcher
    from tests.core.common import StubUnit

    root = StubUnit("root")
    outer, last = StubUnit("outer", [root]), StubUnit("last", [root])
    inner = StubUnit("inner", [root, outer])

    def label(target: Any) -> str:
        return "-" if target is None or target is root else target.label

    prefetcher: Any = Prefetcher(BackwardPrefetch.BACKWARD_POST, None)
    for at in range(2):
        prefetcher.start_forward()
        for unit in (last, inner, outer, root):  # as their forwards end
            prefetcher.post_forward(unit)
        prefetcher.start_backward()
        for unit in (root, outer, inner):
            prefetcher.pre_backward(unit)
        targets = [label(prefetcher.post_backward(inner)), label(prefetcher.post_backward(outer))]
        yield f"targets after the backwards of inner and outer, step {at + 1}", targets
        prefetcher.pre_backward(last)
    prefetcher = Prefetcher(BackwardPrefetch.BACKWARD_PRE, None)
    tanh = StubUnit("tanh", [root], numel=0)
    for _ in range(2):
        prefetcher.start_forward()
        for unit in (inner, tanh, outer, root):
            prefetcher.post_forward(unit)
        prefetcher.start_backward()
        prefetcher.pre_backward(root)
        prefetcher.pre_backward(outer)
        target = label(prefetcher.pre_backward(tanh))
        prefetcher.pre_backward(inner)
    yield "the target before the backward of a unit without parameters", target


@check("prefetch.3", because=_backward)
def backwards_on_a_gpu() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch
    from tutorials.exercises.virtual import train
    from tutorials.exercises.watching import turns

    for setting in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None):
        name = setting.name if setting else "no prefetch"
        for steps in (1, 3):
            gpu = train([1024] * 4, steps=steps, backward_prefetch=setting)
            yield f"{name}: gathers (+) and computations on a GPU in step {steps}", turns(gpu)
            yield at_most(
                f"{name}: seconds on a GPU of step {steps}", gpu.report()["step"], slack=0.02
            )


@check("prefetch.3", ranks=2, because=_backward)
def backwards_on_two_ranks() -> Iterator[Any]:
    from minifsdp.core.api import BackwardPrefetch
    from tutorials.exercises.watching import Nested, trained, turns_on_ranks, wrapped

    for setting in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST):
        model = wrapped(Nested(), backward_prefetch=setting)
        for at in range(3):
            _, backward = turns_on_ranks(model, at)
            yield f"gathers of backward {at + 1} on two ranks, {setting.name}", backward
    yield from trained(wrapped(Nested()), 2, lambda m, x: (m(x), m.kept.pow(2).sum())[1])

"""Checks of limiter.py: with plain lists, and on a virtual GPU whose host runs ahead."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import at_least, at_most


class Event:
    """An event that says when the host has waited for it."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self.waited, self.passed = name, waited, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waited.append(self.name)
        self.passed = True

    def wait(self) -> None:
        self.waited.append(f"{self.name}, by the compute stream alone")


class Unit:
    """What a limiter knows of a unit."""

    def __init__(self, label: str, around: "list[Unit] | None" = None, stays: bool = False) -> None:
        self.label, self.ancestors, self.is_limited = label, around or [], not stays
        self.module = nn.Module()
        for outer in self.ancestors[-1:]:
            outer.module.add_module(label, self.module)


def _fairscale(what: str, want: Any, got: Any) -> str | None:
    if "compute stream" in str(got):
        return "event.wait() lets the compute stream wait and the host go on: it is the host's turn"
    if "admit" in what:
        return "it only ever waits after a free, so every unit is admitted at once"
    if "waited for" in what:
        return "after each free the host waits for the event that freed() is given"
    if "reserved" in what:
        return "reserved memory grows with every unit: the event of a free is not waited for"
    return None


@check("limiter.1", because=_fairscale)
def each_free_is_waited_for() -> Iterator[Any]:
    from minifsdp.core.limiter import SynchronizeAfterFree

    waited: list[str] = []
    limiter = SynchronizeAfterFree()
    for name in "abc":
        yield f"admit({name}), a prefetch", limiter.admit(Unit(name), needed=False)
        yield f"admit({name})", limiter.admit(Unit(name), needed=True)
        limiter.freed(Unit(name), Event(name, waited))
        yield f"events waited for after {name} was freed", list(waited)


@check("limiter.1", because=_fairscale)
def memory_stays_small_on_a_gpu() -> Iterator[Any]:
    from minifsdp.core.limiter import SynchronizeAfterFree
    from tutorials.exercises.virtual import train

    gpu = train(limit_all_gathers=SynchronizeAfterFree())
    yield at_most("reserved bytes of a training step on a GPU", gpu.report()["peak reserved"])


def _queue(what: str, want: Any, got: Any) -> str | None:
    if "prefetch" in what and got is True:
        return "units that the host has not freed take all the room, so a prefetch is declined"
    if "prefetch" in what and got is False:
        return "there was room for it; do units that are freed already still count?"
    if "needed" in what:
        return "a unit that is needed now has to be admitted, whatever the limit is"
    if "waited for" in what and isinstance(got, list):
        if len(got) > len(want):
            return "the host waits for more than it must, so the device runs dry"
        if len(got) < len(want):
            return "the host does not wait, so one more unit has memory than the limit allows"
        return "the oldest event comes first"
    if "waits for the device" in what or "seconds" in what:
        return "the host waits for the newest event, or for all of them, and the device runs dry"
    if "alive" in what:
        return (
            "more units are alive than the limit says: the event of a unit before is never waited "
            "for, or units of the step before are not counted"
        )
    return None


@check("limiter.2", because=_queue)
def the_oldest_event_is_waited_for() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    waited: list[str] = []
    limiter = EventQueue(2)
    for name in "abcd":
        unit = Unit(name)
        yield f"admit({name}), needed", limiter.admit(unit, needed=True)
        limiter.freed(unit, Event(name, waited))
        yield f"events waited for after {name} was freed, with a limit of 2", list(waited)


@check("limiter.2", because=_queue)
def the_first_step_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    for limit in (2, 3):
        figures = train(steps=1, limit_all_gathers=limit, backward_prefetch=None).report()
        yield at_most(
            f"units alive in a first step, limit {limit}", figures["peak unsharded units"]
        )
        yield at_most(f"seconds of a first step, limit {limit}", figures["step"], slack=0.02)


def _drift(what: str, want: Any, got: Any) -> str | None:
    if "alive" in what and "step" in what:
        return (
            "the limit holds in the first step and drifts after it: events of the step before are "
            "still in the queue, and one wait for each admission does not make up for them"
        )
    if "root itself" in what and isinstance(got, list) and len(got) < len(want):
        return (
            "one more unit has memory than the limit allows: a unit that did not count while it "
            "was around others does when it is freed, so one wait may not make enough room"
        )
    if "stays" in what or "around" in what:
        return (
            "units around it, and those that their strategy keeps, do not count: no wait frees them"
        )
    return _queue(what, want, got)


@check("limiter.3", because=_drift)
def a_prefetch_is_declined_where_there_is_no_room() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    limiter, (a, b, c) = EventQueue(2), map(Unit, "abc")
    yield "admit(a), needed", limiter.admit(a, needed=True)
    yield "admit(b), a prefetch beside one unit", limiter.admit(b, needed=False)
    yield "admit(c), a prefetch beside two units", limiter.admit(c, needed=False)
    limiter.freed(a, Event("a", []))
    yield "admit(c), a prefetch when one of two was freed", limiter.admit(c, needed=False)
    yield "admit of a third, needed", limiter.admit(Unit("d"), needed=True)


@check("limiter.3", because=_drift)
def several_events_may_have_to_be_waited_for() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    waited: list[str] = []
    limiter = EventQueue(3)
    for name in "abc":
        limiter.admit(unit := Unit(name), needed=True)
        limiter.freed(unit, Event(name, waited))
    yield "events waited for when three were freed, limit 3", list(waited)
    limiter.admit(d := Unit("d"), needed=True)
    yield "events waited for when d is the third of three", list(waited)
    limiter.admit(Unit("e"), needed=False)
    yield "events waited for when d and e are two of three", list(waited)
    limiter.freed(d, Event("d", waited))
    limiter.admit(Unit("f"), needed=True)
    yield "events waited for when e and f are two of three, and d was freed", list(waited)


@check("limiter.3", because=_drift)
def more_may_be_alive_that_the_host_has_freed() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    waited: list[str] = []
    limiter = EventQueue(2, freeing=1)
    for name in "abcd":
        limiter.admit(unit := Unit(name), needed=True)
        limiter.freed(unit, Event(name, waited))
    yield "events waited for when four were freed, limit 2, freeing 1", list(waited)
    limiter.admit(Unit("e"), needed=True)
    limiter.admit(Unit("f"), needed=False)
    yield "events waited for when e and f are two, and one is being freed", list(waited)
    yield "admit(g), a prefetch beside two units", limiter.admit(Unit("g"), needed=False)


@check("limiter.3", because=_drift)
def ancestors_and_units_that_stay_do_not_count() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    root, stays = Unit("root"), Unit("stays", stays=True)
    limiter = EventQueue(1)
    limiter.admit(root, needed=True)
    limiter.admit(stays, needed=True)
    inner = Unit("inner", around=[root])
    yield (
        "a prefetch with its root around it and a unit that stays",
        limiter.admit(inner, needed=False),
    )
    yield "a prefetch beside it", limiter.admit(Unit("other", around=[root]), needed=False)


@check("limiter.3", because=_drift)
def a_unit_around_others_counts_when_it_is_freed() -> Iterator[Any]:
    from minifsdp.core.limiter import EventQueue

    waited: list[str] = []
    limiter, root = EventQueue(2), Unit("root")
    limiter.admit(root, needed=True)
    for name in "ab":
        limiter.admit(unit := Unit(name, around=[root]), needed=True)
        limiter.freed(unit, Event(name, waited))
    yield "events waited for when two inside of root were freed", list(waited)
    limiter.freed(root, Event("root", waited))
    limiter.admit(Unit("c"), needed=True)
    yield "events waited for before c, when a, b and then root itself were freed", list(waited)


@check("limiter.3", because=_drift)
def every_step_on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    for limit in (1, 2, 3):
        figures: list[dict[str, Any]] = []
        train(
            steps=5,
            limit_all_gathers=limit,
            each_step=lambda gpu, f=figures: f.append(gpu.report()),
        )
        for step, found in enumerate(figures):
            yield at_most(
                f"units alive in step {step + 1}, limit {limit}", found["peak unsharded units"]
            )
            yield at_least(
                f"of them made use of, step {step + 1}, limit {limit}",
                found["peak unsharded units"],
            )
        yield at_most(f"seconds of step 5, limit {limit}", figures[-1]["step"], slack=0.02)

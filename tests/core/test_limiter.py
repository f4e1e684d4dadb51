"""limiter.py: how many units at once."""

import pytest

from minifsdp.core.limiter import EventQueue, NoLimit, SynchronizeAfterFree, limiter_of
from minifsdp.core.streams import CpuEvent

from .common import StubUnit


class Noted:
    """An event that says when the host has waited for it."""

    def __init__(self, log, name):
        self.log, self.name, self.passed = log, name, False

    def query(self):
        return self.passed

    def synchronize(self):
        self.log.append(self.name)
        self.passed = True


def units(names, ancestors=(), is_limited=True):
    return [StubUnit(name, list(ancestors), is_limited=is_limited) for name in names]


@pytest.mark.direct
class TestEventQueue:
    def test_prefetches_are_admitted_as_long_as_there_is_room(self):
        limiter, (a, b, c) = EventQueue(2), units("abc")
        assert limiter.admit(a, needed=True)
        assert limiter.admit(b, needed=False), "b is the second of two"
        assert not limiter.admit(c, needed=False), "c would be the third of two"

    def test_what_is_needed_is_always_admitted(self):
        limiter, (a, b) = EventQueue(1), units("ab")
        assert limiter.admit(a, needed=True) and limiter.admit(b, needed=True)

    def test_the_host_waits_for_the_oldest_frees_and_for_no_more_than_it_must(self):
        log, limiter = [], EventQueue(3)
        for unit in units("abcd"):
            limiter.admit(unit, needed=True)
            limiter.freed(unit, Noted(log, unit.label))
        assert log == ["a"], "when d comes, b and c may still be on their way out"
        e, f = units("ef")
        limiter.admit(e, needed=True)
        limiter.admit(f, needed=False)
        assert log == ["a", "b", "c"], "d, e and f are the three now"

    def test_what_the_device_has_freed_already_takes_no_room(self):
        """A unit may be freed early, and its event be passed before one that was heard of first."""
        log, limiter, (a, b, c) = [], EventQueue(2), units("abc")
        limiter.admit(a, needed=True)
        limiter.admit(b, needed=True)
        limiter.freed(a, Noted(log, "a"))
        limiter.freed(b, CpuEvent())
        limiter.admit(c, needed=True)
        assert log == [], "only a and c may have memory"

    def test_a_unit_that_was_freed_by_the_host_holds_its_memory_until_its_event(self):
        log, limiter, (a, b) = [], EventQueue(1), units("ab")
        limiter.admit(a, needed=True)
        limiter.freed(a, Noted(log, "a"))
        assert limiter.admit(b, needed=False) and log == ["a"], "only one may have memory"

    def test_more_may_be_alive_that_the_host_has_freed(self):
        log, limiter = [], EventQueue(2, freeing=1)
        for unit in units("abcd"):
            limiter.admit(unit, needed=True)
            limiter.freed(unit, Noted(log, unit.label))
        assert log == ["a"], "when d comes, b and c may still be on their way out"
        e, f, g = units("efg")
        limiter.admit(e, needed=True)
        assert limiter.admit(f, needed=False)
        assert log == ["a", "b", "c"], "e and f are the two, d is the one"
        assert not limiter.admit(g, needed=False), "the host has not freed e and f"
        limiter.admit(g, needed=True)
        assert log == ["a", "b", "c"], "the host waits for no more than it did with room"

    def test_units_around_it_and_those_that_stay_are_not_counted(self):
        limiter, (root,), (stays,) = EventQueue(1), units("r"), units("s", (), False)
        (inner,) = units("i", ancestors=[root])
        limiter.admit(root, needed=True)
        limiter.admit(stays, needed=True)
        assert limiter.admit(inner, needed=False), "neither is in its way"

    def test_a_prefetch_that_was_declined_takes_no_room(self):
        limiter, (a, b) = EventQueue(1), units("ab")
        assert limiter.admit(a, needed=True)
        assert not limiter.admit(b, needed=False)
        limiter.freed(a, CpuEvent())
        assert limiter.admit(b, needed=False), "only a was alive"


@pytest.mark.direct
def test_what_users_write_means():
    default, three = limiter_of(True), limiter_of(3)
    assert (default.limit, default.freeing) == (2, 1) and (three.limit, three.freeing) == (3, 0)
    assert isinstance(limiter_of(False), NoLimit)
    own = SynchronizeAfterFree()
    assert limiter_of(own) is own

"""How many at once: the rate limiter.

On a GPU the host runs ahead: it queues kernels far faster than they execute. So it also reaches the
next unit's all-gather, and the one after, long before the GPU has finished with the first unit's
parameters. Memory that a stream may still read cannot be given to another one, so each gather gets
a *fresh* block, when it is launched: memory of many units is reserved though one is in use. Two
teams met this:

- fairscale (PR 972, April 2022, not merged): prefetch, and let the host wait after every free for
  what was launched on the compute stream. A model of 175 billion parameters had 22 GB of a GPU
  reserved instead of 75. In July a comment there said that the wait alone does it in PyTorch's own
  FSDP: 47 % of the memory instead of 95, with a T5 of 8 billion. The thread has the reason, too.
- PyTorch (PRs 83666 and 83917, August 2022): record an *event* when a unit is freed, and before
  gathering another one wait for the event of the unit before the last. The host stays ahead by one
  unit instead of by none. On by default since 2023 (PR 104900), with a limit of two.

PyTorch's queue takes at most one event off at each gather and is never emptied, so after the first
step its bound is three, not two. The one here holds the bound: it counts the units that are alive.

On a CPU memory is free when it is freed and no event is ever waited for; there the limit decides
whether a prefetch may be issued while the current unit is alive.
"""

from collections import deque
from typing import Protocol

from torch.profiler import record_function

from minifsdp.streams import Event
from minifsdp.unit import Unit


class Limiter(Protocol):
    """Asked before every gather, told of every free."""

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Make room for ``unit``; the host may block in here.

        Args:
            needed: it is about to be used. Otherwise it is a prefetch, which may be declined. The
                answer depends on program order alone, never on timing: ranks that decided
                differently would gather in different orders, and wait for each other forever.
        """

    def freed(self, unit: Unit, event: Event) -> None:
        """The host has freed ``unit``; the device is done with it once ``event`` is passed."""


class EventQueue:
    """At most ``limit`` units alive: gathered or being gathered, or freed by the host but not yet
    by the device. PyTorch's way.

    Not counted: units around the one asked for, which must be alive while it runs (the root, for
    one), and those that keep their parameters from forward to backward, as their strategy says.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._alive: list[Unit] = []
        self._freeing: deque[Event] = deque()

    def admit(self, unit: Unit, needed: bool) -> bool:
        others = sum(u.reshard_after_forward and u not in unit.ancestors for u in self._alive)
        room = self.limit - others - 1  # how many may still be on their way out
        if room < 0 and not needed:
            return False
        while len(self._freeing) > max(room, 0):
            wait_for_free(self._freeing.popleft())
        self._alive.append(unit)
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        self._alive.remove(unit)
        self._freeing.append(event)


class SynchronizeAfterFree:
    """Wait for the compute stream after every free, whatever comes next. fairscale's way."""

    def admit(self, unit: Unit, needed: bool) -> bool:
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        wait_for_free(event)


class NoLimit:
    """Let the host run ahead as far as it likes."""

    def admit(self, unit: Unit, needed: bool) -> bool:
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """Nothing to do."""


def make_limiter(limit: "bool | int | Limiter") -> Limiter:
    """What ``limit_all_gathers`` means: True is 2, False is none, a number is itself.

    Raises:
        ValueError: the number is less than 1.
        TypeError: it is something else, such as None.
    """
    if limit is False:
        return NoLimit()
    if limit is True:
        return EventQueue(2)
    if isinstance(limit, int):
        if limit < 1:
            raise ValueError(
                f"limit_all_gathers={limit}: at least 1 unit must be alive to compute with it. "
                f"Use False for no limit."
            )
        return EventQueue(limit)
    methods = (getattr(limit, name, None) for name in ("admit", "freed"))
    if isinstance(limit, type) or not all(callable(method) for method in methods):
        raise TypeError(
            f"limit_all_gathers={limit!r}: it is True (at most 2 units alive), False (no limit), a "
            f"number of units, or a minifsdp.Limiter, which has the methods admit and freed."
        )
    return limit


def wait_for_free(event: Event) -> None:
    """Block the host until the device has freed a unit too."""
    if not event.query():  # so that in a profile the name means a wait that really happened
        with record_function("FullyShardedDataParallel.rate_limiter"):
            event.synchronize()

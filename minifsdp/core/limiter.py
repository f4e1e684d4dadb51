"""The rate limiter: how many units may be unsharded at the same time.

On a GPU the host runs ahead: it queues kernels much faster than the device executes them. So it
also queues the next unit's all-gather, and the one after that, long before the device has used the
parameters of the first unit::

    host      gather 1  compute 1  free 1  gather 2  compute 2  free 2  gather 3 ...
    device    gather 1 ................ compute 1 ...

Memory that one stream may still read cannot be given to another stream. So each all-gather gets
*new* memory, and the device has reserved memory for many units while it uses one. A limiter makes
the host wait before it starts an all-gather. Two projects found this:

- fairscale (PR 972, April 2022, not merged) prefetched, and after every free the host waited for
  the compute stream. For a model of 175 billion parameters, 22 GB of each GPU were reserved instead
  of 75. In July a comment on the PR reported that the wait alone helps PyTorch's FSDP as well: 47 %
  of the memory instead of 95, for a T5 of 8 billion. It also explains why.
- PyTorch (PRs 83666 and 83917, August 2022) records an *event* when a unit is freed. Before it
  gathers another unit, it waits for the event of the unit before the last. So the host stays one
  unit ahead. This is on by default since 2023 (PR 104900), with a limit of two.

PyTorch's queue waits for at most one event before each all-gather, and a step ends with events in
it. So from the second step on three units can be alive, and not two. That is the better limit: if
the host waits until the device has freed a unit, it has queued nothing that the device could do
next. :class:`EventQueue` counts the units, so that a limit holds in every step. By default it
allows two, and a third one that the host has freed and the device has not.

On a CPU, memory that is freed is not in use, and the host never waits here. There the limit decides
whether a prefetch may start while the current unit is unsharded.

Source: Zhao et al., "PyTorch FSDP", arXiv:2304.11277, section 3.4.
"""

from collections import deque
from typing import Protocol, runtime_checkable

from torch.profiler import record_function

from .streams import Event
from .unit import Unit


@runtime_checkable
class Limiter(Protocol):
    """What the engine calls before every all-gather and after every free.

    Any object with these two methods can be given as ``limit_all_gathers``.
    """

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Allow or decline the all-gather of ``unit``. This may block the host.

        The answer may depend on the order of the calls, but not on the time that something takes.
        Otherwise ranks could decide differently, gather units in different orders, and wait for
        each other forever.

        Args:
            unit: it is SHARDED. If it is admitted, its all-gather starts next.
            needed: the unit is about to be used, and has to be admitted. Otherwise this is a
                prefetch, which may be declined.

        Returns:
            Whether the unit is admitted.
        """

    def freed(self, unit: Unit, event: Event) -> None:
        """The host has freed ``unit``, which was admitted. This may block the host.

        Args:
            event: passed when the device does not use the memory any more.
        """


class EventQueue:
    """At most ``limit`` units are alive at the same time. This is PyTorch's way.

    A unit is alive from the start of its all-gather until the *device* does not use its memory any
    more. Two kinds do not count: the ancestors of the unit that is to be gathered, which must be
    unsharded while it runs; and units that stay unsharded whatever the limit is
    (``Unit.is_limited``).

    Args:
        limit: number of units, at least 1.
        freeing: so many more may be alive if the host has freed them.

    Sources: pytorch PRs 83666, 83917 and 104900.
    """

    def __init__(self, limit: int, freeing: int = 0) -> None:
        self.limit, self.freeing = limit, freeing
        self._alive: list[Unit] = []
        self._freeing: deque[Event] = deque()  # of units that only the host has freed

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Wait until the device has freed so many units that there is room for ``unit``.

        Returns:
            False for a prefetch if other units that the host has not freed take all the room. A
            unit that is needed is always admitted.
        """
        room = self.limit - 1  # beside the units that the host has not freed
        for other in self._alive:
            if other.is_limited and other not in unit.ancestors:
                room -= 1
        if room < 0 and not needed:
            return False
        while len(self._freeing) > max(room, 0) + self.freeing:
            wait_for_free(self._freeing.popleft())
        self._alive.append(unit)
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """Remember the event, and do not wait: the host stays ahead of the device."""
        self._alive.remove(unit)
        if not event.query():  # else the host would wait for one before it that is not passed
            self._freeing.append(event)


class SynchronizeAfterFree:
    """Wait for the compute stream after every free. This is fairscale's way (PR 972)."""

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Admit every unit."""
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """Block the host until the device has freed the unit."""
        wait_for_free(event)


class NoLimit:
    """The host runs ahead without a limit."""

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Admit every unit."""
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """Do nothing."""


def limiter_of(limit: bool | int | Limiter) -> Limiter:
    """The limiter for the argument ``limit_all_gathers``: True is PyTorch's limit, 2 units and one
    that only the device has not freed; a number is that many; False is no limit."""
    if isinstance(limit, bool):
        return EventQueue(2, freeing=1) if limit else NoLimit()
    return EventQueue(limit) if isinstance(limit, int) else limit


def wait_for_free(event: Event) -> None:
    """Block the host until the device has freed a unit.

    Args:
        event: as in :meth:`Limiter.freed`. If the host has to wait for it, a profile shows
            "FullyShardedDataParallel.rate_limiter", as with PyTorch.
    """
    if not event.query():  # without this check a profile would show waits of no time
        with record_function("FullyShardedDataParallel.rate_limiter"):
            event.synchronize()

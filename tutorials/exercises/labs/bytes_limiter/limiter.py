"""Lab: a limiter by bytes.

The default admits two units, whatever their size. Two large units need much memory, and two small
ones are too few to hide the latency of their gathers. Write a limiter that counts bytes.

Measured: reserved memory of a training step on a virtual GPU. 48 small units, two large ones in the
middle. Less is better.
Rules: a step takes no longer than with the default (1 % is forgiven). No races. On real ranks
the values are right. The answers may depend on the order of the calls, and not on times.

``EventQueue`` here takes the place of the engine's; ``EventQueue(2)`` is made for it. This one is
the default. ``unit.unsharded.nbytes`` says what a unit takes. The limiter sees a unit when it is
admitted, and not before.
"""

from collections import deque

from minifsdp.core.limiter import wait_for_free
from minifsdp.core.streams import Event
from minifsdp.core.unit import Unit


class EventQueue:
    """At most ``limit`` units are alive at the same time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._alive: list[Unit] = []
        self._freeing: deque[Event] = deque()

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Wait until there is room for ``unit``; False declines a prefetch."""
        others = sum(u.is_limited and u not in unit.ancestors for u in self._alive)
        room = self.limit - others - 1
        if room < 0 and not needed:
            return False
        while len(self._freeing) > max(room, 0):
            wait_for_free(self._freeing.popleft())
        self._alive.append(unit)
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """The host has freed ``unit``; the device has when ``event`` is passed."""
        self._alive.remove(unit)
        self._freeing.append(event)

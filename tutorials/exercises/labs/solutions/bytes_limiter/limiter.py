"""A limiter by bytes: small units may pile up, large ones may not."""

from collections import deque

from minifsdp.core.limiter import wait_for_free
from minifsdp.core.streams import Event
from minifsdp.core.unit import Unit


class ByteLimiter:
    """At most as many bytes are alive at the same time as the largest unit has.

    The largest unit needs its memory anyway. So a model reserves hardly more than that, and many
    small units can be gathered ahead, which hides the latency of their gathers.
    """

    def __init__(self) -> None:
        self._budget = 0  # bytes of the largest unit that was seen; the same on all ranks
        self._alive: list[Unit] = []
        self._freeing: deque[tuple[int, Event]] = deque()

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Wait until the device has freed so many bytes that there is room for ``unit``."""
        self._budget = max(self._budget, unit.unsharded.nbytes)
        others = [u for u in self._alive if u.is_limited and u not in unit.ancestors]
        room = self._budget - unit.unsharded.nbytes - sum(u.unsharded.nbytes for u in others)
        if room < 0 and not needed:
            return False
        while self._freeing and sum(nbytes for nbytes, _ in self._freeing) > max(room, 0):
            wait_for_free(self._freeing.popleft()[1])
        self._alive.append(unit)
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        """Remember how many bytes are free once the event is passed."""
        self._alive.remove(unit)
        self._freeing.append((unit.unsharded.nbytes, event))

"""limiter.py with one list of units, each with the event of its free or None, for the queue."""

from minifsdp.core.limiter import wait_for_free  # the reference's: tests/replace.py
from minifsdp.core.streams import Event
from minifsdp.core.unit import Unit


class EventQueue:
    def __init__(self, limit: int, freeing: int = 0) -> None:
        self.limit, self.freeing = limit, freeing
        self.held: list[tuple[Unit, Event | None]] = []  # in the order of gathers, then of frees

    def admit(self, unit: Unit, needed: bool) -> bool:
        in_use, leaving = 0, []
        for entry in self.held:
            if entry[1] is not None:
                leaving.append(entry)
            elif entry[0].is_limited and entry[0] not in unit.ancestors:
                in_use += 1
        if in_use >= self.limit and not needed:
            return False
        while len(leaving) > max(self.limit - in_use - 1, 0) + self.freeing:
            gone = leaving.pop(0)
            wait_for_free(gone[1])
            self.held.remove(gone)
        self.held.append((unit, None))
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        self.held.remove((unit, None))
        if not event.query():
            self.held.append((unit, event))

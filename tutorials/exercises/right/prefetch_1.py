"""Searches the last pass with enumerate, and has no position but that of the unit before."""

from minifsdp.core.unit import Unit


class Order:
    """Remembers where the unit was found that was visited last."""

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self.current: list[Unit] = []
        self.found = -1

    def start(self) -> None:
        self.found = -1
        if len(self.current) > 0:
            self.last = list(self.current)
            self.current = []

    def forget(self) -> None:
        self.current = list[Unit]()

    def visit(self, unit: Unit) -> Unit | None:
        self.current = [*self.current, unit]
        places = [i for i, other in enumerate(self.last) if other is unit]
        if not places:
            return None
        later = [i for i in places if i > self.found]
        self.found = min(later) if later else min(places)
        return self.upcoming()

    def upcoming(self) -> Unit | None:
        for unit in self.last[self.found + 1 :]:
            return unit
        return None

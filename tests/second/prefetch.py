"""prefetch.py with an Order that looks up places in a table, and does not search a list."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from minifsdp.core.unit import Unit


class Order:
    def __init__(self) -> None:
        self.current: list[Unit] = []
        self.last = []

    @property
    def last(self) -> list[Unit]:
        return list(self.followers.values())[:-1]

    @last.setter
    def last(self, units: Sequence[Unit]) -> None:
        self.followers: dict[int, Unit | None] = {place: unit for place, unit in enumerate(units)}
        self.followers[len(units)] = None
        self.places: dict[Unit, list[int]] = defaultdict(list)
        for place, unit in enumerate(units):
            self.places[unit].append(place)
        self.here = 0

    def start(self) -> None:
        self.last, self.current = self.current or self.last, []

    def forget(self) -> None:
        self.current = []

    def visit(self, unit: Unit) -> Unit | None:
        self.current.append(unit)
        places = self.places.get(unit)
        if places is None:
            return None
        later = bisect_left(places, self.here)
        self.here = 1 + places[later if later < len(places) else 0]
        return self.upcoming()

    def upcoming(self) -> Unit | None:
        return self.followers[self.here]

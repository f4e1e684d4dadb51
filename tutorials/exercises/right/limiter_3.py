"""One list of all that is alive, in the order in which it was freed."""


class EventQueue:
    def __init__(self, limit: int, freeing: int = 0) -> None:
        self.limit, self.freeing = limit, freeing
        self.in_use: dict = {}
        self.leaving: list = []

    def admit(self, unit, needed) -> bool:
        around = {id(other) for other in unit.ancestors}
        counted = [
            other for other in self.in_use.values() if id(other) not in around and other.is_limited
        ]
        if not needed and len(counted) >= self.limit:
            return False
        may_stay = max(self.limit - 1 - len(counted), 0) + self.freeing
        waited = self.leaving[: max(len(self.leaving) - may_stay, 0)]
        self.leaving = self.leaving[len(waited) :]
        for event in waited:
            event.synchronize()
        self.in_use[id(unit)] = unit
        return True

    def freed(self, unit, event) -> None:
        del self.in_use[id(unit)]
        self.leaving.append(event)

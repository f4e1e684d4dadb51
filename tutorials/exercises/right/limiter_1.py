"""Remembers the event, and waits for it at once, without the profiler's mark."""


class SynchronizeAfterFree:
    def __init__(self) -> None:
        self.last = None

    def admit(self, unit, needed) -> bool:
        return True

    def freed(self, unit, event) -> None:
        self.last = event
        self.last.synchronize()

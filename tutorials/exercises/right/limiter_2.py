"""PyTorch's own, which drifts from the second step on."""

from collections import deque


class EventQueue:
    def __init__(self, limit: int, freeing: int = 0) -> None:
        self.limit = limit + freeing
        self._queue: deque = deque()

    def admit(self, unit, needed) -> bool:
        if len(self._queue) >= self.limit:
            self._queue.popleft().synchronize()
        return True

    def freed(self, unit, event) -> None:
        self._queue.append(event)

"""A flag in place of None; recorded events and later work wait for all that was submitted."""

from collections.abc import Callable

from torch import Tensor


class CpuEvent:
    """Has a list of functions to call, and a flag."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self.todo = [] if finish is None else [finish]
        self.passed = finish is None

    def query(self) -> bool:
        return self.passed

    def wait(self) -> None:
        print("waiting")
        self.passed = True
        while self.todo:
            self.todo.pop()()

    def synchronize(self) -> None:
        self.wait()


class CpuStream:
    """Waits for other streams when something is submitted, and not before."""

    def __init__(self) -> None:
        self.before: list[CpuEvent] = []
        self.submitted: list[CpuEvent] = []

    def submit(self, launch: Callable[[], Callable[[], None]], label: str = "") -> CpuEvent:
        for event in self.before:
            event.wait()
        self.before = []
        event = CpuEvent(launch())
        self.submitted = [e for e in self.submitted if not e.query()] + [event]
        return event

    def record_event(self) -> CpuEvent:
        events = list(self.submitted)
        return CpuEvent(lambda: [event.wait() for event in events] and None)

    def wait_event(self, event: CpuEvent) -> None:
        self.before.append(event)

    def record_stream(self, tensor: Tensor) -> None:
        return None

"""Virtual time: one host and the streams it launches work on.

A GPU does what it is told, later. The host says "run this kernel on that stream" and goes on; each
stream does what it was told in order, as soon as it can::

    host      | launch a | launch b | launch c |  ...
    compute              |    a    |    b    |  ...
    unshard                        .    |      c      |    c was told to wait for a

All this is determined when a kernel is launched: it starts when the host has launched it, when the
stream is done with what came before, and when the events are passed that the stream was told to
wait for. So there is nothing to simulate step by step. A stream is the time at which it will be
idle, an event is a time, and waiting is taking the larger of two numbers.

The host is ahead of the streams, but not without end: a stream holds 1,024 launches that have not
started, and the next one blocks the host until the first of them has.

Not modelled: kernels on two streams slowing each other down.
"""

from collections import deque
from dataclasses import dataclass, field

LAUNCH_QUEUE = 1024
"""Launches that a CUDA stream holds before the next one blocks the host. About this many; CUDA does
not document it."""


@dataclass
class Lane:
    """A stream: when it will be idle, and when what it has yet to start will start."""

    idle_at: float = 0.0
    starts: "deque[float]" = field(default_factory=deque)


class Clock:
    """The host's time, in seconds since the beginning, and that of the streams.

    Args:
        queue: launches that a stream holds.
    """

    def __init__(self, queue: int = LAUNCH_QUEUE) -> None:
        self.now = 0.0
        self.lanes: dict[str, Lane] = {}
        self._queue = queue

    def lane(self, stream: str) -> Lane:
        """A stream by its name; made when it is first used."""
        return self.lanes.setdefault(stream, Lane())

    def work(self, seconds: float) -> None:
        """The host is busy."""
        self.now += seconds

    def launch(self, stream: str, seconds: float) -> tuple[float, float]:
        """Tell a stream to be busy for so long. Returns when it starts and ends; both are at or
        after ``now``. The host blocks while the stream's queue is full."""
        lane = self.lane(stream)
        while lane.starts and lane.starts[0] <= self.now:
            lane.starts.popleft()
        if len(lane.starts) >= self._queue:
            self.block(lane.starts.popleft())
        start = max(self.now, lane.idle_at)
        lane.idle_at = start + seconds
        lane.starts.append(start)
        return start, lane.idle_at

    def wait(self, stream: str, time: float) -> None:
        """What is launched on ``stream`` from now on starts at ``time`` or later."""
        lane = self.lane(stream)
        lane.idle_at = max(lane.idle_at, time)

    def block(self, time: float) -> float:
        """The host waits until ``time``. Returns for how long."""
        waited = max(time - self.now, 0.0)
        self.now += waited
        return waited

    def idle_at(self) -> float:
        """When all streams will have done everything that they were told."""
        return max((lane.idle_at for lane in self.lanes.values()), default=0.0)

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

Kernels are slower beside a collective, which occupies some of the multiprocessors and of the
memory's bandwidth. One that is launched later is slowed where the two overlap. If it was launched
before the collective, its times have been told already; what it loses comes behind it.
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
    kernels: "deque[tuple[float, float]]" = field(default_factory=deque)  # not known to be over


class Clock:
    """The host's time, in seconds since the beginning, and that of the streams.

    Args:
        queue: launches that a stream holds.
        beside_collectives: speed of a kernel while a collective runs; alone it is 1.
    """

    def __init__(self, queue: int = LAUNCH_QUEUE, beside_collectives: float = 1.0) -> None:
        self.now = 0.0
        self.lanes: dict[str, Lane] = {}
        self._queue, self._speed = queue, beside_collectives
        self._collectives: deque[tuple[float, float]] = deque()

    def lane(self, stream: str) -> Lane:
        """A stream by its name; made when it is first used."""
        return self.lanes.setdefault(stream, Lane())

    def work(self, seconds: float) -> None:
        """The host is busy."""
        self.now += seconds

    def launch(self, stream: str, seconds: float) -> tuple[float, float]:
        """Tell a stream to be busy for so long, or longer beside a collective. Returns when it
        starts and ends; both are at or after ``now``."""
        lane, start = self._start(stream)
        lane.idle_at = self._end(start, seconds)
        lane.kernels.append((start, lane.idle_at))
        return start, lane.idle_at

    def launch_collective(self, stream: str, seconds: float) -> tuple[float, float]:
        """The same for a collective, which slows kernels and is not slowed itself."""
        lane, start = self._start(stream)
        lane.idle_at = start + seconds
        self._slow_others(start, lane.idle_at)
        self._collectives.append((start, lane.idle_at))
        return start, lane.idle_at

    def _start(self, stream: str) -> tuple[Lane, float]:
        """When a stream begins what comes next. The host blocks while the queue is full."""
        lane = self.lane(stream)
        while lane.starts and lane.starts[0] <= self.now:
            lane.starts.popleft()
        if len(lane.starts) >= self._queue:
            self.block(lane.starts.popleft())
        start = max(self.now, lane.idle_at)
        lane.starts.append(start)
        return lane, start

    def _end(self, start: float, seconds: float) -> float:
        """Of a kernel, beside the collectives that are known."""
        while self._collectives and self._collectives[0][1] <= self.now:
            self._collectives.popleft()
        time, left = start, seconds
        for begin, end in self._collectives:
            if end > time and begin < time + left:
                left -= max(begin - time, 0.0)
                time = max(begin, time)
                done = min(left, (end - time) * self._speed)
                time, left = time + done / self._speed, left - done
        return time + left

    def _slow_others(self, begin: float, end: float) -> None:
        """A collective will run: all lanes are later by what their kernels lose beside it."""
        for lane in self.lanes.values():
            while lane.kernels and lane.kernels[0][1] <= self.now:
                lane.kernels.popleft()
            beside = sum(max(min(end, e) - max(begin, b), 0.0) for b, e in lane.kernels)
            lane.idle_at += beside * (1 / self._speed - 1)

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

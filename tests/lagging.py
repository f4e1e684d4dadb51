"""Devices that lag behind their host, as a GPU does, and do so in a way that can be counted on.

:func:`lagging_device` is late with its computation. Collectives and kernels give their results at
once, so that training is right; but the *marks* that the host leaves in the compute stream count as
passed only once the host waits for one of them. It is the slowest GPU there could be: it never gets
ahead unless it is made to. What a limiter allows to be alive on it is the worst case on any device.

:func:`deferring_device` is late with everything else: gathers, reductions and copies are not even
begun before somebody waits for them, and what is to come is NaN till then. Whoever computes with
it too early, or waits for the wrong thing, gets other numbers than DDP.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

import minifsdp.core.reshard
import minifsdp.core.unshard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core import streams
from minifsdp.core.streams import CpuEvent, CpuStream, Streams
from tests.small import replaced


class LateEvent:
    """Passed when this mark, or a later one, has been synchronized with."""

    def __init__(self, stream: "LateStream") -> None:
        stream.marks += 1
        self._stream, self._mark = stream, stream.marks

    def wait(self) -> None:
        """A stream would wait; the host does not."""

    def synchronize(self) -> None:
        self._stream.host_waits += 1
        self._stream.reached = max(self._stream.reached, self._mark)

    def query(self) -> bool:
        return self._stream.reached >= self._mark


class LateStream(CpuStream):
    """The compute stream of such a device."""

    def __init__(self) -> None:
        self.marks = self.reached = self.host_waits = 0

    def record_event(self) -> LateEvent:
        return LateEvent(self)


class PromptStream(CpuStream):
    """A communication stream: what is submitted to it is over when `submit` returns."""

    def submit(self, launch, label="") -> CpuEvent:
        launch()()
        return CpuEvent()

    def wait_event(self, event) -> None:
        """One stream waits for another; the host does not."""


@contextmanager
def lagging_device() -> Iterator[None]:
    """Inside, models that are wrapped there run on such a device."""

    def make(device: torch.device) -> Streams:
        return Streams(device, LateStream(), *(PromptStream() for _ in range(5)))

    with patch.dict(streams.BACKENDS, cpu=make):
        yield


class DeferredEvent:
    """Passed once its stream has done this much."""

    def __init__(self, stream: "DeferringStream", mark: int) -> None:
        self._stream, self._mark = stream, mark

    def synchronize(self) -> None:
        self._stream.advance(self._mark)

    wait = synchronize  # the computation is the caller's, and needs it now

    def query(self) -> bool:
        return self._stream.done >= self._mark


class DeferringStream(CpuStream):
    """A stream on which nothing happens until somebody waits for an event of it."""

    def __init__(self) -> None:
        self.done = 0
        self._queue: deque[Callable[[], object]] = deque()

    def submit(self, launch, label="") -> DeferredEvent:
        self._queue.append(lambda: launch()())
        return self.record_event()

    def record_event(self) -> DeferredEvent:
        return DeferredEvent(self, self.done + len(self._queue))

    def wait_event(self, event) -> None:
        self._queue.append(event.synchronize)

    @property
    def under_way(self) -> bool:
        """Whether something was submitted that nobody has waited for."""
        return len(self._queue) > 0

    def advance(self, mark: int) -> None:
        while self.done < mark:
            self.done += 1  # first, so that what fails is not done twice
            self._queue.popleft()()


@contextmanager
def deferring_device() -> Iterator[None]:
    """Inside, models that are wrapped there run on such a device."""
    unshard = minifsdp.core.unshard.unshard

    def make(device: torch.device) -> Streams:
        return Streams(device, CpuStream(), *(DeferringStream() for _ in range(5)))

    def unshard_into_nan(unit, its_streams):
        unshard(unit, its_streams)
        unit.unsharded.allocate()  # as on a GPU: taken at once, filled later
        unit.unsharded.data.fill_(torch.nan)

    with (
        patch.dict(streams.BACKENDS, cpu=make, cuda=make),
        replaced(unshard, unshard_into_nan),
    ):
        yield


@contextmanager
def count_alive(model: FSDP) -> Iterator[list[int]]:
    """How many units the device has in memory just after each gather begins, the root aside."""
    counts: list[int] = []
    held, freeing = set(), []
    unshard, reshard = minifsdp.core.unshard.unshard, minifsdp.core.reshard.reshard

    def counted_unshard(unit, its_streams):
        unshard(unit, its_streams)
        if unit is not model.engine.root:
            held.add(unit)
            counts.append(len(held) + sum(not event.query() for event in freeing))

    def counted_reshard(unit, its_streams):
        event = reshard(unit, its_streams)
        if unit is not model.engine.root:
            held.discard(unit)
            freeing.append(event)
        return event

    with replaced(unshard, counted_unshard), replaced(reshard, counted_reshard):
        yield counts

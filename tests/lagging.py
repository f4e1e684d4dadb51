"""A device that lags behind its host, as a GPU does, and does so in a way that can be counted.

Collectives and kernels give their results at once, so that training is right; but the *marks* that
the host leaves in the compute stream count as passed only once the host waits for one of them. It
is the slowest GPU there could be: it never gets ahead unless it is made to. What a limiter allows
to be alive on it is the worst case on any device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

import minifsdp.engine
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import streams
from minifsdp.streams import CpuEvent, CpuStream, Streams


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

    def submit(self, launch) -> CpuEvent:
        launch()()
        return CpuEvent()

    def wait_event(self, event) -> None:
        """One stream waits for another; the host does not."""


@contextmanager
def lagging_device() -> Iterator[None]:
    """Inside, models that have not run yet run on such a device."""

    def make(device: torch.device) -> Streams:
        return Streams(device, LateStream(), PromptStream(), PromptStream())

    with patch.dict(streams.BACKENDS, cpu=make):
        yield


@contextmanager
def count_alive(model: FSDP) -> Iterator[list[int]]:
    """How many units the device has in memory just after each gather begins, the root aside."""
    counts: list[int] = []
    held, freeing = set(), []
    unshard, reshard = minifsdp.engine.unshard, minifsdp.engine.reshard

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

    with (
        patch.object(minifsdp.engine, "unshard", counted_unshard),
        patch.object(minifsdp.engine, "reshard", counted_reshard),
    ):
        yield counts

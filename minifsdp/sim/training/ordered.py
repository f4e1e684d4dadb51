"""Frees in stream order: PyTorch's time in the memory of two units, with a host that never waits.

A limit of two that holds costs time, for two reasons:

- In the backward the host waits in the limiter *before* it queues what the unit computes. When the
  wait is over, the compute stream is idle until the host has launched the next gather.
- A unit around others takes a place beside them, though it is small: the gather of the next large
  unit begins only when the one before it is done.

The host waits for the sake of the allocator: memory that two streams use may be given out again
when the host has seen that both are done. Here the unshard stream waits in its place::

    compute   | backward 3 | backward 2 | backward 1 |
    unshard   | gather 2   | gather 1   |               gather 1 waits for backward 3: its memory

So a unit's memory belongs to the next gather as soon as the *host* has freed the unit. Because a
gather waits for all frees before it, it has to be asked for before the unit before it is freed: so
this prefetches in the forward as well.

And units around others are not counted, and a prefetch that finds one goes on to the first unit
inside.

The engine does not do this by default. If a program keeps a view of a unit's parameters, that
memory is freed by whoever drops the view, and nothing orders that free. And with offload the host
uploads shards for as many units as it is ahead.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.core.parameters import Parameters
from minifsdp.core.prefetch import Order
from minifsdp.core.streams import Event, Streams
from minifsdp.core.unit import Unit
from minifsdp.sim.training.history import Approach
from minifsdp.support.prefetch_stats import CountedPrefetcher


class OrderedCompute:
    """The compute stream. Where the allocator would be told that it uses memory of the unshard
    stream, the unshard stream waits for that use."""

    def __init__(self, streams: Streams) -> None:
        compute, self._streams = streams.compute, streams
        self.submit, self.record_event = compute.submit, compute.record_event
        self.wait_event = compute.wait_event

    def record_stream(self, tensor: Tensor) -> None:
        # Without this wait the next gather could write to this memory while a layer reads it.
        self._streams.unshard.wait_event(self.record_event())


class OrderedFrees(Parameters):
    """Frees units in the order of the streams, and gathers several ahead if there is room. A root
    that is freed early (on_demand.py) does not come this way: the allocator is told of its use."""

    def reshard(self, unit: Unit) -> None:
        streams = self.streams
        self.streams = replace(streams, compute=OrderedCompute(streams))
        try:
            super().reshard(unit)
        finally:
            self.streams = streams

    def prefetch(self, target: Any) -> None:
        for one in target if isinstance(target, list) else [target]:
            super().prefetch(one)  # also of a list: it may be declined


class TwoInnermost:
    """Declines a prefetch if two units with none inside are there. The host does not wait: what it
    has freed is free."""

    def __init__(self) -> None:
        self._there: list[Unit] = []
        self._around: set[Unit] = set()

    def admit(self, unit: Unit, needed: bool) -> bool:
        self._around.update(unit.ancestors)
        others = sum(u.reshard_after_forward and u not in self._around for u in self._there)
        if others >= 2 and unit not in self._around and not needed:
            return False
        self._there.append(unit)
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        self._there.remove(unit)


class PastOuter(CountedPrefetcher):
    """Finds the next unit and, if that is around others, the next inside of it."""

    def pre_forward(self, unit: Unit) -> Any:
        return _past_outer(self.pre_forward_order, super().pre_forward(unit))

    def pre_backward(self, unit: Unit) -> Any:
        return _past_outer(self.pre_backward_order, super().pre_backward(unit))


def _past_outer(order: Order, target: Unit | None) -> list[Unit]:
    targets = [] if target is None else [target]
    while targets:
        after = order.last[order.last.index(targets[-1]) + 1 :]
        if not after or targets[-1] not in after[0].ancestors:
            break
        targets.append(after[0])
    return targets


ORDERED = Approach(
    ForwardPrefetch.FORWARD_PRE,
    BackwardPrefetch.BACKWARD_PRE,
    PastOuter,
    TwoInnermost,
    OrderedFrees,
    frees_early=True,
)

"""The gradients of one backward, on their way to the optimizer.

A backward completes one unit's gradient after the other. Each is reduced as soon as it is complete,
while the backward goes on; the optimizer gets them when the backward is over, all of them or none::

    backward    | d | c | b | a |
    reduce          | d | c | b | a |
    sharded_flat_param.grad         all four, at the end

When a gradient is complete, each reduction that is under way goes one stage further (reduce.py). So
one gradient at a time is being sent. Otherwise a network slower than the computation would pile up
the gradients of the whole model, all waiting to be sent.
"""

from typing import Any

from .reduce import Reduction, store_gradient
from .streams import Streams
from .unit import Unit


class Gradients:
    """Those of the backward that is under way.

    Args:
        streams: of the device that the units are on.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._reductions: list[Reduction] = []  # in the order of their start
        self._under_way: list[Reduction] = []  # those of them that have to go on, newest first

    def take(self, unit: Unit, grad: Any) -> None:
        """A unit's gradient is complete, or a part of it: start to reduce it.

        Args:
            grad: ``[padded_numel]``, as the unit's views give it (views.py). If it is a tensor
                nobody else may hold it: it is written to.
        """
        self._advance()
        reduction = Reduction(unit, grad, self.streams)
        reduction.start()
        self._reductions.append(reduction)
        self._under_way.insert(0, reduction)

    def _advance(self) -> None:
        """Each reduction that is under way goes one stage further, the newest first. Ranks that
        replicate each other may have units in another order: if the oldest were first, each would
        wait for a stage that the other one starts only after it."""
        self._under_way = [reduction for reduction in self._under_way if reduction.advance()]

    def finish(self) -> list[Reduction]:
        """Wait for all reductions, then hand everything over. Returns them, in the order of their
        start."""
        while self._under_way:
            self._advance()
        for reduction in self._reductions:
            reduction.wait_for_result()
        for reduction in self._reductions:
            store_gradient(reduction)
        reductions, self._reductions = self._reductions, []
        return reductions

    def drop(self) -> None:
        """The backward has failed. Its memory must not be given away while it is being sent."""
        reductions, self._reductions, self._under_way = self._reductions, [], []
        for reduction in reductions:
            reduction.event.wait()

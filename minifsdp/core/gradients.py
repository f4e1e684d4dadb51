"""The gradients of one backward, on their way to the optimizer.

A backward completes one unit's gradient after the other. Each is reduced as soon as it is complete,
while the backward goes on; the optimizer gets them when the backward is over, all of them or none::

    backward    | d | c | b | a |
    reduce          | d | c | b | a |
    sharded_flat_param.grad         all four, at the end

When a gradient is complete, each reduction that is under way goes one stage further (reduce.py). So
one gradient at a time is being sent. Otherwise a network slower than the computation would pile up
the gradients of the whole model, all waiting to be sent.

While a unit has reasons for its gradient to *wait* (``unit.waits``: no_sync.py, and ranks that use
different units, checks/rank_agreement.py), the gradient is held here until the end of the backward.
"""

from typing import Any

from torch import Tensor

from .api import Stats
from .reduce import Reduction, store_gradient
from .streams import Streams
from .unit import Unit


class Gradients:
    """Those of the backward that is under way.

    Args:
        streams: of the device that the units are on; set anew when the model moves.
        stats: counts the reductions.

    Attributes:
        held: unit -> gradient, ``[padded_numel]``, of those that are not reduced.
    """

    def __init__(self, streams: Streams, stats: Stats) -> None:
        self.streams, self.stats = streams, stats
        self._reductions: list[Reduction] = []  # in the order of their start
        self._under_way: list[Reduction] = []  # those of them that have to go on, newest first
        self.held: dict[Any, Tensor] = {}

    @property
    def pending(self) -> int:
        """How many there are that the optimizer has not got yet."""
        return len(self._reductions) + len(self.held)

    def take(self, unit: Unit, grad: Any) -> None:
        """A unit's gradient is complete, or a part of it: start to reduce it, or hold it if it has
        to wait; a unit's second part is added to the first.

        Args:
            grad: ``[padded_numel]``, as the unit's views give it (views.py). If it is a tensor
                nobody else may hold it: it is written to. What is none has a ``whole()``.
        """
        if unit.waits:
            before = self.held.get(unit)
            part = grad if isinstance(grad, Tensor) else grad.whole()
            self.held[unit] = part if before is None else before.add_(part)
        else:
            self._reduce(unit, grad)

    def _reduce(self, unit: Unit, grad: Any) -> None:
        self._advance()
        reduction = Reduction(unit, grad, self.streams)
        reduction.start()
        self._reductions.append(reduction)
        self._under_way.insert(0, reduction)
        self.stats.reductions += 1

    def _advance(self) -> None:
        """Each reduction that is under way goes one stage further, the newest first. Ranks that
        replicate each other may have units in another order: if the oldest were first, each would
        wait for a stage that the other one starts only after it."""
        self._under_way = [reduction for reduction in self._under_way if reduction.advance()]

    def reduce_held(self, unit: Unit) -> None:
        """Reduce what is held of a unit; if nothing is, zeros: this rank's part of the mean."""
        grad = self.held.pop(unit, None)
        self._reduce(unit, unit.view_maker.no_gradient(unit) if grad is None else grad)

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
        self.held.clear()
        for reduction in reductions:
            reduction.event.wait()

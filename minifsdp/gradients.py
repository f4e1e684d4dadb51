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

import torch
from torch import Tensor

from minifsdp.api import Stats
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.no_sync import store_unreduced
from minifsdp.reduce import Reduction, store_gradient
from minifsdp.streams import Streams
from minifsdp.support.grad_hooks import after_gradient
from minifsdp.unit import Unit


class Gradients:
    """Those of the backward that is under way.

    Args:
        streams: of the device that the units are on; set anew when the model moves.
        stats: counts the reductions.
    """

    def __init__(self, streams: Streams, stats: Stats) -> None:
        self.streams, self.stats = streams, stats
        self._reductions: list[Reduction] = []  # in the order of their start
        self._under_way: list[Reduction] = []  # those of them that have to go on, newest first
        self._held: dict[Unit, Tensor] = {}  # not reduced

    @property
    def pending(self) -> int:
        """How many there are that the optimizer has not got yet."""
        return len(self._reductions) + len(self._held)

    def take(self, unit: Unit, grad: Tensor | Pieces) -> None:
        """A unit's gradient is complete, or a part of it: start to reduce it, or hold it if it has
        to wait; a unit's second part is added to the first.

        Args:
            grad: ``[padded_numel]``. If it is a tensor nobody else may hold it: it is written to.
        """
        if unit.waits:
            before = self._held.get(unit)
            self._held[unit] = whole(grad) if before is None else before.add_(whole(grad))
        else:
            self._reduce(unit, grad)

    def _reduce(self, unit: Unit, grad: Tensor | Pieces) -> None:
        # What no_sync has left of the unit is added, once in a backward.
        if unit.unreduced_grad is not None and all(r.unit is not unit for r in self._reductions):
            # What no_sync has left stays as it is until this backward has succeeded.
            waiting = unit.unreduced_grad.grad
            assert isinstance(grad, Tensor)  # Backward sees to it
            grad = grad.to(torch.promote_types(grad.dtype, waiting.dtype)).add_(waiting)
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
        grad = self._held.pop(unit, None)
        self._reduce(unit, unit.view_maker.no_gradient(unit) if grad is None else grad)

    def finish(self) -> None:
        """Wait for all reductions, then hand everything over."""
        while self._under_way:
            self._advance()
        for reduction in self._reductions:
            reduction.wait_for_result()
        for reduction in self._reductions:
            store_gradient(reduction)
        while self._held:  # freed one after the other, since each may be replaced by a cast copy
            unit, grad = self._held.popitem()
            store_unreduced(unit, grad)
        complete = [reduction.unit for reduction in self._reductions]
        self._reductions.clear()
        for unit in complete:  # last: a hook may raise, or be an optimizer
            after_gradient(unit)

    def drop(self) -> None:
        """The backward has failed. Its memory must not be given away while it is being sent."""
        reductions, self._reductions, self._under_way = self._reductions, [], []
        self._held.clear()
        for reduction in reductions:
            reduction.event.wait()

"""Sums are made out of place, and the list is a new one each time."""

import torch
from torch import Tensor

from minifsdp.api import Stats
from minifsdp.no_sync import store_unreduced
from minifsdp.reduce import (
    Reduction,
    reduce_gradient,
    start_next_part,
    store_gradient,
    wait_for_first_part,
    wait_for_reduction,
)
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
        self._held: dict[Unit, Tensor] = {}  # not reduced

    @property
    def pending(self) -> int:
        """How many there are that the optimizer has not got yet."""
        return len(self._reductions) + len(self._held)

    def reduce(self, unit: Unit, grad: Tensor) -> None:
        """With other names, out of place, and counted first."""
        self.stats.reductions = self.stats.reductions + 1
        again = unit in [reduction.unit for reduction in self._reductions]
        kept = unit.unreduced_grad
        if kept is not None and not again:
            grad = grad + kept.grad
        if self._reductions:
            *older, last = self._reductions
            if older:
                start_next_part(older[-1], self.streams)
            wait_for_first_part(last, self.streams)
        self._reductions = [*self._reductions, reduce_gradient(unit, grad, self.streams)]

    def hold(self, unit: Unit, grad: Tensor) -> None:
        """Keep a gradient that is not to be reduced now; a unit's second one is added to it."""
        before = self._held.get(unit)
        self._held[unit] = grad if before is None else before.add_(grad)

    def reduce_held(self, unit: Unit) -> None:
        """Reduce what is held of a unit; if nothing is, zeros: this rank's part of the mean."""
        grad = self._held.pop(unit, None)
        if grad is None:
            grad = torch.zeros(unit.padded_numel, dtype=unit.unsharded.dtype, device=unit.device)
        self.reduce(unit, grad)

    def finish(self) -> None:
        """Wait for all reductions, then hand everything over."""
        if self._reductions:
            wait_for_first_part(self._reductions[-1], self.streams)
        for reduction in self._reductions:
            start_next_part(reduction, self.streams)
        for reduction in self._reductions:
            wait_for_reduction(reduction)
        for reduction in self._reductions:
            store_gradient(reduction)
        for unit, grad in self._held.items():
            store_unreduced(unit, grad)
        complete = [reduction.unit for reduction in self._reductions]
        self._reductions.clear()
        self._held.clear()
        for unit in complete:  # last: a hook may raise, or be an optimizer
            after_gradient(unit)

    def drop(self) -> None:
        """The backward has failed. Its memory must not be given away while it is being sent."""
        reductions, self._reductions = self._reductions, []
        self._held.clear()
        for reduction in reductions:
            reduction.event.wait()

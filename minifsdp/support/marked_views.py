"""Views of units in rows, which tell which parameters have no gradient.

A parameter that no rank has used must not get one, not even zeros. So in the gradient of a unit
each rank *marks* the parameters that it has not used (rows.py), as the backward has shown. When the
gradient is reduced, those that no rank has used are cleared again (:class:`UnusedParams`).

A unit in rows may also be frozen in part. Then only a part of its views has gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from minifsdp.core.layers import Layer
from minifsdp.core.reduce import Reduction
from minifsdp.core.views import SplitViews
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.piece_views import Grads, PieceViews, before_joining
from minifsdp.support.unsharded_storage import FeaturedFlatParam


class MarkedSplitViews(SplitViews):
    """As :class:`~minifsdp.core.views.SplitViews`, and marks parameters that have no gradient."""

    def make(self, unit: FeaturedUnit) -> list[Tensor]:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        layout: Any = unit.layout
        unsharded = unit.unsharded
        views: list[Tensor] = layout.unflatten(unsharded.flat_param, unsharded.frozen)
        before_joining(views, partial(_note, unsharded, layout.places))
        return views

    def take_gradient(self, unit: FeaturedUnit) -> Any:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        layout: Any = unit.layout
        used, unit.unsharded.used = unit.unsharded.used, frozenset()
        grad = super().take_gradient(unit)
        mark_unused(unit, grad, [number for number in layout.marked if number not in used])
        return grad

    def drop_gradient(self, unit: FeaturedUnit) -> None:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        super().drop_gradient(unit)
        unit.unsharded.used = frozenset()


class MarkedPieceViews(PieceViews):
    """As :class:`~minifsdp.support.piece_views.PieceViews`, and marks what has no gradient."""

    def take_gradient(self, unit: FeaturedUnit) -> Any:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        layout: Any = unit.layout
        grads: Any = unit.unsharded.arrived
        unused = [number for number in layout.marked if grads[layout.places[number]] is None]
        grad = super().take_gradient(unit)
        mark_unused(unit, grad.pieces[-1], unused)  # the marks come last
        return grad


class UnusedParams(Layer):
    """Takes the gradient away from parameters that no rank has used in a backward, if they had none
    before it. Zeros would let an optimizer change them, by weight decay or by momentum.

    Args:
        units: of the root.
    """

    def __init__(self, units: Sequence[FeaturedUnit]) -> None:
        self._units = [unit for unit in units if unit.mesh is not None]
        # For each unit the numbers of the parameters that have no gradient.
        self._empty: dict[FeaturedUnit, set[int]] = {}

    def end_of_backward(self) -> None:
        """Note which parameters have no gradient, of units of which this rank has not used all."""
        self._empty = {unit: _without_gradient(unit) for unit in self._units if unit.has_unused}

    def complete(self, reductions: Sequence[Reduction]) -> None:
        """Clear those that the marks show as unused. The host waits for the marks."""
        unused: dict[FeaturedUnit, set[int]] = {}
        for reduction in reductions:
            unit = reduction.unit
            if unit in self._empty:
                layout: Any = unit.layout
                marked = {*layout.unused(reduction.value)}
                unused[unit] = unused.get(unit, self._empty[unit]) & marked
        for unit, numbers in unused.items():
            for number in numbers:
                unit.optimized_params[number].grad = None
        self._empty = {}

    def reset(self) -> None:
        """What a failed backward has not used is forgotten."""
        for unit in self._units:
            unit.has_unused = False


def _note(unsharded: FeaturedFlatParam, places: Sequence[int], grads: Grads) -> None:
    """Note which parameters, of those at ``places``, a backward has a gradient for. (Not a method:
    a graph holds this function, and must not hold more than it needs.)"""
    unsharded.used |= {at for at, place in enumerate(places) if grads[place] is not None}


def _without_gradient(unit: FeaturedUnit) -> set[int]:
    params, waiting = unit.optimized_params, unit.unreduced_grad
    cleared: Sequence[int] = () if waiting is None else waiting.cleared
    return {n for n, param in enumerate(params) if param.grad is None or n in cleared}


def mark_unused(unit: FeaturedUnit, grad: Tensor, unused: list[int]) -> None:
    """Mark the parameters of which this rank has no gradient.

    Args:
        grad: of the unit, or the last of its pieces; written.
        unused: their positions in ``layout.with_grad`` (rows.py).
    """
    layout: Any = unit.layout
    if unused:
        layout.mark_unused(grad, unused)
        unit.has_unused = True

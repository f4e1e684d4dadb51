"""Views of units in rows, which tell which parameters have no gradient.

A parameter that no rank has used must not get one, not even zeros. So in the gradient of a unit
each rank *marks* the parameters that it has not used (rows.py), as the backward has shown.

A unit in rows may also be frozen in part. Then only a part of its views has gradients.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from minifsdp.rows import Rows
from minifsdp.support.piece_views import PieceViews
from minifsdp.support.unsharded_storage import UnshardedFlatParam
from minifsdp.unit import Unit
from minifsdp.views import SplitViews


class MarkedSplitViews(SplitViews):
    """A :class:`~minifsdp.views.ViewMaker`, as :class:`~minifsdp.views.SplitViews`.

    Attributes:
        used: of each dtype that the unit is computed in, the numbers of the parameters that have a
            gradient which nobody has taken yet, in the order in which they are laid.
    """

    def __init__(self) -> None:
        self.used: dict[UnshardedFlatParam, set[int]] = {}

    def make(self, unit: Unit) -> list[Tensor]:
        """See :class:`~minifsdp.views.ViewMaker`."""
        unsharded, layout = unit.unsharded, unit.layout
        assert isinstance(layout, Rows)
        views = layout.unflatten(unsharded.flat_param, unsharded.frozen)
        if unsharded.flat_param.requires_grad:
            self._watch_split(views[layout.with_grad[0]], unsharded)
        return views

    def _watch_split(self, view: Tensor, unsharded: UnshardedFlatParam) -> None:
        """Note which parts of the unsharded flat parameter a backward has a gradient for."""
        assert view.grad_fn is not None
        split = view.grad_fn.next_functions[0][0]
        assert split is not None
        used = self.used  # a graph that holds the hook must not hold more than this

        def note(grads: Sequence[Tensor | None]) -> None:
            now = {number for number, grad in enumerate(grads[::2]) if grad is not None}
            used[unsharded] = used.get(unsharded, set()) | now

        split.register_prehook(note)

    def take_gradient(self, unit: Unit) -> Tensor:
        """See :class:`~minifsdp.views.ViewMaker`."""
        used = self.used.pop(unit.unsharded)
        grad = super().take_gradient(unit)
        _mark_unused(unit, grad, used)
        return grad

    def no_gradient(self, unit: Unit) -> Tensor:
        """See :class:`~minifsdp.views.ViewMaker`."""
        grad = super().no_gradient(unit)
        _mark_unused(unit, grad, set())
        return grad

    def drop_gradient(self, unit: Unit) -> None:
        """See :class:`~minifsdp.views.ViewMaker`."""
        super().drop_gradient(unit)
        self.used.pop(unit.unsharded, None)


class MarkedPieceViews(PieceViews):
    """A :class:`~minifsdp.views.ViewMaker`, as
    :class:`~minifsdp.support.piece_views.PieceViews`."""

    def take_gradient(self, unit: Unit) -> Any:
        """See :class:`~minifsdp.views.ViewMaker`."""
        # Where parameters begin; what is between them may be empty, and begins where the next does.
        places = [*accumulate(unit.layout.sizes, initial=0)][::2]
        arrived = self.arrived[unit.unsharded]
        used = {number for number, place in enumerate(places) if place in arrived}
        grad = super().take_gradient(unit)
        _mark_unused(unit, grad.pieces[-1], used)  # the marks come last
        return grad

    def no_gradient(self, unit: Unit) -> Tensor:
        """See :class:`~minifsdp.views.ViewMaker`."""
        grad = super().no_gradient(unit)
        _mark_unused(unit, grad, set())
        return grad


def _mark_unused(unit: Unit, grad: Tensor, used: set[int]) -> None:
    """Mark the parameters of which this rank has no gradient.

    Args:
        grad: of the unit, or the last of its pieces; written.
        used: the numbers of the others, in the order in which they are laid.
    """
    layout = unit.layout
    assert isinstance(layout, Rows)
    # Those without elements are neither used nor unused.
    unused = [n for n, size in enumerate(layout.sizes[::2]) if size and n not in used]
    if unused:
        layout.mark_unused(grad, unused)
        unit.has_unused = True

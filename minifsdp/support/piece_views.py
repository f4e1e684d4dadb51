"""Views whose gradients stay where autograd has left them, one for each parameter.

To copy them together to one flat gradient (core/views.py) takes a pass over the memory, and as much
memory again. NCCL needs the copy. On a CPU the pieces are sent without it (comm/pieces.py)::

    SplitViews    gradients of the views --copied together--> flat_param.grad --> reduced
    PieceViews    gradients of the views --------------------------------------> reduced, in pieces

Both are the views of one split. Here a hook takes their gradients where autograd would join them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from minifsdp.comm.pieces import Pieces
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.unsharded_storage import FeaturedFlatParam

Grads = Sequence[Tensor | None]
"""One for each piece that the unsharded flat parameter was split into: the parameters, and the
padding."""


class PieceViews:
    """The ``view_maker`` of a unit that the ranks of a shard group share, on CPUs."""

    def make(self, unit: FeaturedUnit) -> list[Tensor]:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        unsharded = unit.unsharded
        views = unit.layout.unflatten(unsharded.flat_param, unsharded.frozen)
        before_joining(views, partial(_keep, unsharded))
        return views

    def has_gradient(self, unit: FeaturedUnit) -> bool:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        return unit.unsharded.arrived is not None

    def take_gradient(self, unit: FeaturedUnit) -> Any:
        """See :class:`~minifsdp.core.views.SplitViews`. Returns
        :class:`~minifsdp.comm.pieces.Pieces`, one for each of ``unit.layout.sizes``."""
        grads: Any = unit.unsharded.arrived
        unit.unsharded.arrived = None
        for number, size in enumerate(unit.layout.sizes):
            if grads[number] is None:
                grads[number] = unit.unsharded.flat_param.new_zeros(size, requires_grad=False)
        return Pieces(grads)

    def drop_gradient(self, unit: FeaturedUnit) -> None:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        unit.unsharded.arrived = None


def before_joining(views: Sequence[Tensor], hook: Callable[[Grads], Grads | None]) -> None:
    """Call ``hook`` when a backward has gone through every use of ``views``, before autograd joins
    their gradients to that of the unsharded flat parameter. The hook gets these gradients, each as
    a 1-D tensor, and may return others.

    Args:
        views: of one unit. Those of frozen parameters are not known to autograd.
    """
    for view in views:
        if view.grad_fn is not None:
            split: Any = view.grad_fn.next_functions[0][0]
            split.register_prehook(hook)
            return


@never_compile_inside
def _keep(unsharded: FeaturedFlatParam, grads: Grads) -> Grads:
    """Keep the gradients, and give autograd none to join. It still calls the hook on the flat
    parameter. (Not a method: a graph holds this, and must not hold more than it needs.)"""
    found = list(grads)
    if unsharded.arrived is not None:
        # A module has run twice. The first gradient may be in use elsewhere, so the second one is
        # not added in place.
        for number, first in enumerate(unsharded.arrived):
            if first is not None:
                second = grads[number]
                found[number] = first if second is None else first + second
    unsharded.arrived = found
    return (None,) * len(grads)

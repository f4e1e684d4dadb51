"""Views whose gradients stay where autograd has left them, one for each parameter.

To copy them together to one flat gradient (views.py) takes a pass over the memory, and the same
memory again. NCCL needs that. On a CPU they can be sent without it (comm/pieces.py)::

    SplitViews    gradients of the views --copied together--> flat_param.grad --> reduced
    PieceViews    gradients of the views --------------------------------------> reduced, in pieces
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.pieces import Pieces
from minifsdp.core.shard import Chunks
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.rows import Rows
from minifsdp.support.unsharded_storage import FeaturedFlatParam

Arrived = dict[FeaturedFlatParam, dict[int, Tensor]]
"""Gradients of views that a backward has computed, by the place of the view in the memory."""


class PieceViews:
    """A :class:`~minifsdp.core.views.ViewMaker` of a unit that the ranks of a shard group share, on
    CPUs.

    Attributes:
        arrived: of each dtype that the unit is computed in, what nobody has taken yet.
    """

    def __init__(self) -> None:
        self.arrived: Arrived = {}

    def make(self, unit: FeaturedUnit) -> list[Tensor]:
        """See :class:`~minifsdp.core.views.ViewMaker`."""
        unsharded = unit.unsharded
        views = _Views.apply(unsharded.flat_param, self.arrived, unsharded, unit.layout)  # type: ignore[no-untyped-call]
        return list(views)

    def has_gradient(self, unit: FeaturedUnit) -> bool:
        """See :class:`~minifsdp.core.views.ViewMaker`."""
        return unit.unsharded in self.arrived

    def take_gradient(self, unit: FeaturedUnit) -> Any:
        """See :class:`~minifsdp.core.views.ViewMaker`. Returns
        :class:`~minifsdp.comm.pieces.Pieces`, one for each of ``unit.layout.sizes``."""
        arrived, place, pieces = self.arrived.pop(unit.unsharded), 0, list[Tensor]()
        for size in unit.layout.sizes:
            grad = arrived.pop(place, None) if size else None
            if grad is None:
                grad = unit.unsharded.flat_param.new_zeros(size, requires_grad=False)
            pieces.append(grad.reshape(-1))
            place += size
        return Pieces(pieces)

    def drop_gradient(self, unit: FeaturedUnit) -> None:
        """See :class:`~minifsdp.core.views.ViewMaker`."""
        self.arrived.pop(unit.unsharded, None)


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        arrived: Arrived,
        unsharded: FeaturedFlatParam,
        layout: Chunks | Rows,
    ) -> tuple[Tensor, ...]:
        views = layout.unflatten(flat, unsharded.frozen)
        ctx.set_materialize_grads(False)  # a parameter without a gradient costs nothing
        ctx.arrived, ctx.unsharded = arrived, unsharded
        ctx.places = [view.storage_offset() for view in views]
        after = flat.numel()  # where the frozen parameters are, in the same memory
        frozen = [view for view in views if view.storage_offset() >= after and view.numel()]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        arrived = ctx.arrived.setdefault(ctx.unsharded, {})
        for place, grad in zip(ctx.places, grads, strict=True):
            if grad is not None and grad.numel():
                # A module that has run twice has two gradients. The first may be in use elsewhere,
                # so they are not added in place.
                arrived[place] = arrived[place] + grad if place in arrived else grad
        # Autograd has nothing to write to the flat parameter. It calls the hook on it all the same.
        return None, None, None, None

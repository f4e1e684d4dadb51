"""The views that the layers compute with, and where their gradients arrive.

The gradients of views that ``torch.split`` makes are led back into what was split: autograd copies
them together to one flat gradient, which NCCL needs. On a CPU they can be sent without that copy
(comm/pieces.py), so there they are kept as they come, one for each parameter.
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.collectives import direct
from minifsdp.comm.pieces import Pieces
from minifsdp.rows import Rows
from minifsdp.shard import Chunks
from minifsdp.support.unsharded_storage import UnshardedFlatParam
from minifsdp.unit import Unit


def views_of(unit: Unit) -> list[Tensor]:
    """A view for each parameter of a unit, in ``unit.unsharded.flat_param``."""
    unsharded, layout = unit.unsharded, unit.layout
    # An all-reduce writes its result to the flat gradient, and so has no use for pieces.
    if direct(unit.device) and unit.shard_group is not None:
        return list(_Views.apply(unsharded.flat_param, unsharded, layout))  # type: ignore[no-untyped-call]
    return layout.unflatten(unsharded.flat_param, unsharded.frozen)


def take_gradient(unit: Unit) -> Tensor | Pieces:
    """What has arrived of a unit's gradient, laid out as ``unit.unsharded.flat_param`` is. What has
    not, and the padding, is zero. Afterwards nothing has arrived."""
    arrived, flat_grad = unit.unsharded.arrived, unit.unsharded.flat_param.grad
    unit.unsharded.drop_gradient()
    if arrived is None:
        assert flat_grad is not None
        return flat_grad
    pieces, place = [], 0
    for size in unit.layout.sizes:
        grad = arrived.pop(place, None) if size else None
        zero = unit.unsharded.flat_param.new_zeros
        pieces.append(zero(size, requires_grad=False) if grad is None else grad.reshape(-1))
        place += size
    return Pieces(pieces)


class _Views(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, unsharded: UnshardedFlatParam, layout: Chunks | Rows
    ) -> tuple[Tensor, ...]:
        views = layout.unflatten(flat, unsharded.frozen)
        ctx.set_materialize_grads(False)  # a parameter without a gradient costs nothing
        ctx.unsharded, ctx.places = unsharded, [view.storage_offset() for view in views]
        after = flat.numel()  # where the frozen parameters are, in the same memory
        frozen = [view for view in views if view.storage_offset() >= after and view.numel()]
        ctx.mark_non_differentiable(*frozen)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        arrived = ctx.unsharded.arrived = ctx.unsharded.arrived or {}
        for place, grad in zip(ctx.places, grads, strict=True):
            if grad is not None and grad.numel():
                # A module that has run twice has two gradients. The first may be in use elsewhere,
                # so they are not added in place.
                arrived[place] = arrived[place] + grad if place in arrived else grad
        return None, None, None  # autograd has nothing to write; it calls the hook all the same

"""The views that the layers compute with, and where their gradients arrive.

The gradients of views that ``torch.split`` makes are led back into what was split: autograd copies
them together to one flat gradient, which NCCL needs. On a CPU they can be sent without that copy
(comm/pieces.py), so there they are kept as they come, one for each parameter.

Of a unit in rows, both ways tell which parameters have no gradient. It is marked (rows.py): a
parameter that no rank has used must not get one.
"""

from collections.abc import Sequence
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
    views = layout.unflatten(unsharded.flat_param, unsharded.frozen)
    if isinstance(layout, Rows) and layout.marks and unsharded.flat_param.requires_grad:
        _watch_split(views[layout.with_grad[0]], unsharded)
    return views


def _watch_split(view: Tensor, unsharded: UnshardedFlatParam) -> None:
    """Note which parts of the unsharded flat parameter a backward has a gradient for."""
    assert view.grad_fn is not None
    split = view.grad_fn.next_functions[0][0]
    assert split is not None

    def note(grads: Sequence[Tensor | None]) -> None:
        used = {number for number, grad in enumerate(grads[::2]) if grad is not None}
        unsharded.used = used if unsharded.used is None else unsharded.used | used

    split.register_prehook(note)


def take_gradient(unit: Unit) -> Tensor | Pieces:
    """What has arrived of a unit's gradient, laid out as ``unit.unsharded.flat_param`` is. What has
    not, and the padding, is zero. Afterwards nothing has arrived."""
    unsharded, sizes = unit.unsharded, unit.layout.sizes
    arrived, flat_grad, used = unsharded.arrived, unsharded.flat_param.grad, unsharded.used
    unsharded.drop_gradient()
    if arrived is None:
        assert flat_grad is not None
        if used is not None:
            _mark(unit, flat_grad, [at for at in range(0, len(sizes), 2) if at // 2 not in used])
        return flat_grad
    pieces, place, missing = [], 0, []
    for at, size in enumerate(sizes):
        grad = arrived.pop(place, None) if size else None
        if grad is None:
            missing.append(at)
            grad = unsharded.flat_param.new_zeros(size, requires_grad=False)
        pieces.append(grad.reshape(-1))
        place += size
    _mark(unit, pieces[-1], missing)
    return Pieces(pieces)


def no_gradient(unit: Unit) -> Tensor:
    """What a rank sends that has no gradient of a unit while others have one."""
    size, dtype = unit.unsharded.flat_param.numel(), unit.unsharded.dtype
    grad = torch.zeros(size, dtype=dtype, device=unit.device)
    _mark(unit, grad, range(len(unit.layout.sizes)))
    return grad


def _mark(unit: Unit, grad: Tensor, missing: Sequence[int]) -> None:
    """Mark the parameters of a unit in rows of which this rank has no gradient.

    Args:
        grad: of the unit, or the last of its pieces.
        missing: the numbers of these pieces. Every second one is of a parameter.
    """
    layout = unit.layout
    if isinstance(layout, Rows) and layout.marks:
        unused = [at // 2 for at in missing if at % 2 == 0 and layout.sizes[at]]
        if unused:
            layout.mark_unused(grad, unused)
            unit.has_unused = True


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

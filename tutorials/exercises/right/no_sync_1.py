"""Sums are new tensors, and not made in place; the cases of the check come in another order."""

import torch
from torch import Tensor

from minifsdp.featured_unit import FeaturedUnit, UnreducedGrad


def store_unreduced(unit: FeaturedUnit, grad: Tensor) -> None:
    param, before = unit.sharded_flat_param, unit.unreduced_grad
    dtype = unit.unreduced_dtype or grad.dtype
    total = grad.to(dtype) if before is None else before.grad + grad
    if param.grad is None:
        param.grad = torch.zeros(param.shape, dtype=param.grad_dtype, device=param.device)
    if param.grad.numel() and param.grad[0] == 0:
        param.grad[0] = -0.0
    unit.unreduced_grad = UnreducedGrad(total, param.grad, param.grad._version, param._version)
    _units.add(unit)
    _watch_optimizers()


def check_unreduced_grad(unit: FeaturedUnit) -> None:
    kept = unit.unreduced_grad
    if kept is None:
        return
    grad = unit.sharded_flat_param.grad
    same = grad is kept.mark and grad._version == kept.mark_version
    if same and unit.sharded_flat_param._version == kept.shard_version:
        return
    if same:
        raise RuntimeError("the parameters were changed")
    cleared = grad is None or bool(((grad == 0) & ~torch.signbit(grad)).all())
    if not cleared:
        raise RuntimeError("the gradient was changed")
    unit.unreduced_grad = None

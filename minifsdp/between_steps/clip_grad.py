"""Clipping gradients by the norm of all of them.

The norm is taken over the whole model, but each rank has only chunks::

    norm^p  =  sum over ranks of  sum over its chunks of  |g|^p

So each rank adds up its own and an all-reduce adds up the ranks'. Two things can go wrong without
a word: to take the local sum for the whole, as ``torch.nn.utils.clip_grad_norm_`` would (it is
refused for that, see flat_parameter.py), and to count twice what several ranks hold alike. Replicas
count once: the first of each group speaks for them. Experts that each rank has for itself count
all, so that every rank finds the same norm and scales what they share alike.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from minifsdp.comm.collectives import Group, add_up
from minifsdp.no_sync import check_unreduced_grad
from minifsdp.unit import Unit


def clip_grad_norm(units: list[Unit], max_norm: float, norm_type: float) -> Tensor:
    """Scale the gradients of ``units`` so that their norm is at most ``max_norm``.

    Args:
        units: all of a root's. All ranks that any of them belongs to take part.
        norm_type: p; ``math.inf`` for the largest absolute value.

    Returns:
        The norm before clipping, ``[]``, the same on every rank; fp32, or fp64 if a unit is.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: gradients of no_sync have not been reduced yet.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: the p of a norm has to be positive, or math.inf")
    for unit in units:
        check_unreduced_grad(unit)
        if unit.unreduced_grad is not None:
            raise RuntimeError(
                f"unit {unit.label} has gradients from no_sync() that are not reduced yet, so "
                f"there is no norm of their sum. Run the last backward outside of no_sync()."
            )
    largest = math.isinf(norm_type)
    full = [unit for unit in units if unit.numel] or units  # an empty one may be on another device
    dtypes = (unit.sharded_flat_param.dtype for unit in full)
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    total = torch.zeros((), dtype=dtype, device=full[0].device)
    for unit in full:
        grad = unit.sharded_flat_param.grad
        speaks = unit.replicate_group is None or unit.replicate_group.rank() == 0
        if grad is not None and grad.numel() and speaks:
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=dtype).to(total.device)
            total = torch.maximum(total, norm) if largest else total + norm**norm_type
    if largest:
        total = total.masked_fill(total.isnan(), math.inf)  # the largest over ranks drops NaN
    for group in max(map(_groups, units), key=lambda groups: math.prod(g.size() for g in groups)):
        add_up(total, group, largest)
    if not largest:
        total = total ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's epsilon
    for unit in full:
        if unit.sharded_flat_param.grad is not None:
            unit.sharded_flat_param.grad.mul_(scale.to(unit.sharded_flat_param.grad.device))
    return total


def _groups(unit: Unit) -> list[Group]:
    return [group for group in (unit.shard_group, unit.replicate_group) if group is not None]

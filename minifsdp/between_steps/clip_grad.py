"""Clip gradients by the norm of all of them.

The norm is that of the whole model, but each rank has only shards::

    norm^p  =  sum over ranks of  sum over its shards of  |g|^p

So each rank adds up the powers of its own gradients, and an all-reduce adds up the sums of all
ranks. Two mistakes would give a wrong norm without an error. The sum of one rank must not be taken
for the total, as ``torch.nn.utils.clip_grad_norm_`` would do; flat_parameter.py refuses that. And
what several ranks have alike must not count several times: of replicas, only those on the first
rank of each replicate group count. Experts, which each rank has for itself, all count, so that all
ranks find the same norm and scale the parameters that they share by the same factor.

Gradients of ignored parameters (wrapping/ignored.py) are whole on each rank, and may differ: to
average them is up to the user. What counts is the mean over the ranks of their p-th powers. If they
are the same on all ranks, that is as in a plain model; if not, all ranks still find the same norm.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minifsdp.comm.collectives import add_up
from minifsdp.core.collectives import Group
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.no_sync import check_unreduced_grad
from minifsdp.support.divided_param import count_cleared


def clip_grad_norm(
    units: list[FeaturedUnit],
    max_norm: float,
    norm_type: float,
    ignored: Sequence[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients in place, so that their norm is at most ``max_norm``.

    A unit's gradient is counted once: on each rank of its shard group, and on one rank of its
    replicate group. The sum goes over the groups of the unit that spans most ranks. The scale is
    ``max_norm / (norm + 1e-6)``, as torch's, and at most 1. For ``math.inf`` a NaN counts as
    infinite.

    Args:
        units: all units of a root. All ranks of their groups have to call this.
        norm_type: p; ``math.inf`` for the largest absolute value.
        ignored: the parameters that are in no unit.

    Returns:
        The norm before clipping, ``[]``, the same on every rank, in fp32, or in fp64 if a unit is;
        on the device of the first unit that has parameters.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: gradients of no_sync have not been reduced yet.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: the p of a norm has to be positive, or math.inf")
    count_cleared(units)
    for unit in units:
        check_unreduced_grad(unit)
        if unit.unreduced_grad is not None:
            raise RuntimeError(
                f"unit {unit.label} has gradients from no_sync() that are not reduced yet, so "
                f"there is no norm of their sum. Run the last backward outside of no_sync()."
            )
    largest = math.isinf(norm_type)
    # A unit without parameters may be on another device.
    units_with_params = [unit for unit in units if unit.numel] or units
    dtypes = (unit.sharded_flat_param.dtype for unit in units_with_params)
    dtype = reduce(torch.promote_types, dtypes, torch.float32).to_real()
    total = torch.zeros((), dtype=dtype, device=units_with_params[0].device)
    for unit in units_with_params:
        grad = unit.sharded_flat_param.grad
        counts = unit.replicate_group is None or unit.replicate_group.rank() == 0
        if grad is not None and grad.numel() and counts:
            norm = _norm(grad, norm_type, dtype).to(total.device)
            total = torch.maximum(total, norm) if largest else total + norm**norm_type
    groups = max(map(_groups, units), key=lambda groups: math.prod(g.size() for g in groups))
    ranks = math.prod(group.size() for group in groups)
    grads = [param.grad for param in ignored if param.grad is not None]
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad  # of an embedding, say
        norm = _norm(values, norm_type, dtype)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(total.device)
        total = torch.maximum(total, norm) if largest else total + norm.pow(norm_type) / ranks
    if largest:
        total = total.masked_fill(total.isnan(), math.inf)  # MAX over ranks ignores NaN
    for group in groups:
        add_up(total, group, largest)
    if not largest:
        total = total ** (1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's epsilon
    for unit in units_with_params:
        if unit.sharded_flat_param.grad is not None:
            unit.sharded_flat_param.grad.mul_(scale.to(unit.sharded_flat_param.grad.device))
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total


def _norm(values: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """In a real ``dtype``. torch sums complex values in the complex one only."""
    summed = dtype.to_complex() if values.is_complex() else dtype
    norm: Tensor = torch.linalg.vector_norm(values, norm_type, dtype=summed)
    return norm


def _groups(unit: FeaturedUnit) -> list[Group]:
    return [group for group in (unit.shard_group, unit.replicate_group) if group is not None]

"""Replicas are divided by their number; powers are added up by hand, over all ranks, in fp64."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.featured_unit import FeaturedUnit
from minifsdp.no_sync import check_unreduced_grad


def clip_grad_norm(
    units: list[FeaturedUnit],
    max_norm: float,
    norm_type: float,
    ignored: Sequence[nn.Parameter] = (),
) -> Tensor:
    if not norm_type > 0:
        raise ValueError("p has to be positive")
    for unit in units:
        check_unreduced_grad(unit)
        if unit.unreduced_grad is not None:
            raise RuntimeError("gradients of no_sync")
    total = torch.zeros((), dtype=torch.float64)
    for unit in units:
        grad = unit.sharded_flat_param.grad
        if grad is None or not grad.numel():
            continue
        values = grad.double().abs()
        if norm_type == math.inf:
            total = torch.maximum(total, values.max().nan_to_num(math.inf, math.inf))
        else:
            copies = 1 if unit.replicate_group is None else unit.replicate_group.size()
            total = total + (values**norm_type).sum() / copies
    grads = [param.grad for param in ignored if param.grad is not None]
    for values in (grad.double().abs() for grad in grads):
        if norm_type == math.inf:
            total = torch.maximum(total, values.max())
        else:
            total = total + (values**norm_type).sum() / dist.get_world_size()
    if any(unit.shard_group is not None or unit.replicate_group is not None for unit in units):
        largest = norm_type == math.inf
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    if norm_type != math.inf:
        total = total ** (1 / norm_type)
    for unit in units:
        if unit.sharded_flat_param.grad is not None:
            scale = min(1.0, max_norm / (float(total) + 1e-6))
            unit.sharded_flat_param.grad *= scale
    for grad in grads:
        grad *= min(1.0, max_norm / (float(total) + 1e-6))
    dtypes = {unit.sharded_flat_param.dtype for unit in units}
    return total if torch.float64 in dtypes else total.float()

"""Fills zeros first, and always adds."""

import torch


def store_gradient(reduction):
    shard = reduction.unit.sharded_flat_param
    if shard.grad is None:
        shard.grad = torch.zeros(shard.shape, dtype=shard.grad_dtype, device=reduction.value.device)
    shard.grad += reduction.value[: shard.numel()].to(shard.grad.dtype)

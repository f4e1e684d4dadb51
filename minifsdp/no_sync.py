"""Gradients that wait: ``no_sync``.

To accumulate over several batches one may reduce once instead of each time::

    with model.no_sync():
        for batch in batches[:-1]:
            loss(model(batch)).backward()     # gradients stay on this rank, whole
    loss(model(batches[-1])).backward()       # reduced together with these

It saves communication and costs memory: whole gradients, in the dtype of the computation, on every
rank; in a second such backward two sets of them, until it has succeeded. Without ``no_sync`` each
batch's gradients are reduced and added up as chunks, which costs the reverse; both give the same
sums, and may be mixed.

What waits is not in ``shard.grad``: it is of another shape. But ``zero_grad()`` has to clear it as
it clears any other gradient, and all that a user clears is ``shard.grad``. So a mark is left there,
zeros if there was nothing, and what waits counts for as long as the mark is untouched.
"""

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.unit import Unit, UnreducedGrad

_units: "WeakSet[Unit]" = WeakSet()  # in which something has waited


def store_unreduced(unit: Unit, grad: Tensor) -> None:
    """Let ``grad``, ``[padded_numel]``, wait for the next reduction."""
    shard = unit.sharded_flat_param
    if unit.unreduced_grad is not None:
        grad = unit.unreduced_grad.grad.add_(grad)
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard, dtype=shard.grad_dtype)
    # Zeros that somebody scales stay zeros, and would look cleared. But scaled, -0 stays -0.
    first = shard.grad[:1]
    first.masked_fill_(first == 0, -0.0)
    unit.unreduced_grad = UnreducedGrad(grad, shard.grad, shard.grad._version, shard._version)
    _units.add(unit)
    _watch_optimizers()


def check_unreduced_grad(unit: Unit) -> None:
    """Forget what waits if the user has cleared it.

    Raises:
        RuntimeError: the user has stepped or changed gradients of which a part was still waiting.
    """
    waiting, shard = unit.unreduced_grad, unit.sharded_flat_param
    if waiting is None:
        return
    grad = shard.grad
    if grad is not waiting.mark or grad._version != waiting.mark_version:
        if grad is None or not (grad.any() or grad[:1].signbit().any()):
            unit.unreduced_grad = None  # zero_grad(), in one of its two ways
            return
        what = "its gradient was changed (scaled, clipped?)"
    elif shard._version != waiting.shard_version:
        what = "its parameters were changed (by an optimizer, by summon_full_params?)"
    else:
        return
    raise _incomplete(unit, what)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)  # of all optimizers; for good


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step before it is made. Afterwards ``zero_grad()`` would wipe out the traces."""
    waiting = {unit.sharded_flat_param: unit for unit in _units if unit.unreduced_grad is not None}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in waiting:
                check_unreduced_grad(waiting[param])
                if waiting[param].unreduced_grad is not None:
                    raise _incomplete(waiting[param], "an optimizer is about to step")


def _incomplete(unit: Unit, what: str) -> RuntimeError:
    return RuntimeError(
        f"unit {unit.label}: {what} while gradients from no_sync() wait to be reduced, so "
        f"part of the sum is missing. Run the last backward before a step outside of "
        f"no_sync(), or drop what waits with zero_grad()."
    )

"""no_sync: gradients that are reduced later.

A program that accumulates gradients over several batches can reduce them once, and not each time::

    with model.no_sync():
        for batch in batches[:-1]:
            loss(model(batch)).backward()     # unsharded gradients stay on this rank
    loss(model(batches[-1])).backward()       # reduced together with these

This saves communication and costs memory: each rank has unsharded gradients, in the dtype of the
computation. During a second such backward it has two sets of them, until that backward succeeds.
Without ``no_sync`` the gradients of each batch are reduced and accumulated in shards. Both give the
same sums, and a program may use both.

An unreduced gradient cannot be in ``shard.grad``, because its shape differs. But ``zero_grad()``
has to clear it, as it clears any other gradient, and that changes only ``shard.grad``. So
``shard.grad`` is used as a mark: it is set to zeros if it was None, and the unreduced gradient is
valid for as long as the mark is not changed. A mark of zeros that was scaled has to be told from
one that was cleared, so its first element is -0: multiplied by a positive number it stays -0, and
``zero_grad()`` makes it 0.
"""

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.unit import Unit, UnreducedGrad

_units: "WeakSet[Unit]" = WeakSet()  # that have had an unreduced gradient


def store_unreduced(unit: Unit, grad: Tensor) -> None:
    """Keep a gradient on this rank until the next reduction, which adds it to its own.

    Args:
        grad: of ``unit.unsharded.flat_param``: ``[padded_numel]``, in its dtype. It is added to the
            unit's unreduced gradient, if there is one.
    """
    shard = unit.sharded_flat_param
    if unit.unreduced_grad is not None:
        grad = unit.unreduced_grad.grad.add_(grad)
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard, dtype=shard.grad_dtype)
    # Zeros that are scaled stay zeros, and would look as if they were cleared. But -0 stays -0.
    first = shard.grad[:1]
    first.masked_fill_(first == 0, -0.0)
    unit.unreduced_grad = UnreducedGrad(grad, shard.grad, shard.grad._version, shard._version)
    _units.add(unit)
    _watch_optimizers()


def check_unreduced_grad(unit: Unit) -> None:
    """Drop the unit's unreduced gradient if ``zero_grad()`` was called since it was stored.

    Raises:
        RuntimeError: the parameters were stepped, or the gradient changed, while a part of the
            gradient was not reduced.
    """
    unreduced, shard = unit.unreduced_grad, unit.sharded_flat_param
    if unreduced is None:
        return
    grad = shard.grad
    if grad is not unreduced.mark or grad._version != unreduced.mark_version:
        if grad is None or not (grad.any() or grad[:1].signbit().any()):
            unit.unreduced_grad = None  # zero_grad(), with set_to_none=True or False
            return
        what = "its gradient was changed (scaled, clipped?)"
    elif shard._version != unreduced.shard_version:
        what = "its parameters were changed (by an optimizer, by summon_full_params?)"
    else:
        return
    raise _incomplete(unit, what)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)  # of all optimizers, until the process ends


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step with a part of the gradient before it is made. After it ``zero_grad()`` would
    clear the mark, and the mistake could not be found."""
    units = {unit.sharded_flat_param: unit for unit in _units if unit.unreduced_grad is not None}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in units:
                check_unreduced_grad(units[param])
                if units[param].unreduced_grad is not None:
                    raise _incomplete(units[param], "an optimizer is about to step")


def _incomplete(unit: Unit, what: str) -> RuntimeError:
    return RuntimeError(
        f"unit {unit.label}: {what} while gradients from no_sync() wait to be reduced, so "
        f"part of the sum is missing. Run the last backward before a step outside of "
        f"no_sync(), or drop these gradients with zero_grad()."
    )

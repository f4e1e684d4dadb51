"""Hooks that users put on parameters.

Torch calls them when a gradient reaches a parameter. The flat parameter that users see is in no
graph, so torch never would. They are called here instead, at the moments of DistributedDataParallel
or, where it has no good one, of torch without ranks::

    p.register_hook(f)                           f(gradient) -> another one, or None
        before the reduction: the gradient of this rank's data, of the whole unit, [n]. What is
        done to each element by itself (scale, clamp, nan_to_num) gives what it gives with DDP.

    p.register_post_accumulate_grad_hook(f)      f(p)
        at the end of the backward, when every ``p.grad`` is what an optimizer would find: the mean
        over ranks, this rank's chunk. So an optimizer may step in there, "fused into the backward".
        In no_sync() nothing is reduced, and nothing is called.

An optimizer in a hook saves no memory here: all gradients are handed over together, or none.
"""

import torch
from torch import Tensor

from minifsdp.unit import Unit


def change_gradient(unit: Unit, grad: Tensor) -> Tensor:
    """Let the hooks of a unit's flat parameter see and replace a gradient before it is reduced.

    Args:
        grad: ``[n * ranks]``, of ``unit.unsharded.flat_param``; may be overwritten.

    Returns:
        The gradient to go on with, of the same shape and dtype.

    Raises:
        RuntimeError: a hook raised one, or returned something of another shape.
    """
    hooks = unit.sharded_flat_param._backward_hooks
    if not hooks:
        return grad
    whole = grad[: unit.numel]  # without padding, which is nobody's gradient
    for hook in list(hooks.values()):
        try:
            with torch.no_grad():
                given = hook(whole)
            whole = whole if given is None else given.view(unit.numel)
        except RuntimeError as error:
            raise RuntimeError(
                f"a hook that was registered on the flat parameter of unit {unit.label} failed: "
                f"{error}\nIt is called with this rank's gradient of the whole unit, of "
                f"{unit.numel} elements, before the reduction over ranks, and has to return one of "
                f"that shape or None. (The parameter itself is a shard, of "
                f"{unit.sharded_flat_param.numel()}. For what needs both, use "
                f"register_post_accumulate_grad_hook.)"
            ) from error
    grad[: unit.numel] = whole
    return grad


def after_gradient(unit: Unit) -> None:
    """Call what waits for the gradient of a unit's flat parameter, which is complete."""
    shard = unit.sharded_flat_param
    with torch.no_grad():
        for hook in list((shard._post_accumulate_grad_hooks or {}).values()):
            hook(shard)
        # Of torch.distributed.optim._apply_optimizer_in_backward, whose own hook is on a node of
        # the graph that is not there.
        for optimizer in getattr(shard, "_in_backward_optimizers", ()):
            optimizer.step()
            shard.grad = None

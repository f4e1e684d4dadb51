"""The gradient hooks that users register on flat parameters.

Torch calls such a hook when a gradient reaches the parameter. The sharded flat parameter, which
users see, is in no graph, so torch would never call its hooks. They are called here instead, at the
moments that DistributedDataParallel calls them at or, where that has no good moment, as in training
without ranks::

    p.register_hook(f)                           f(gradient) -> another gradient, or None
        before the reduction, with this rank's gradient of the whole unit, [numel]. What f does to
        each element by itself (scale, clamp, nan_to_num) has the same result as with DDP.

    p.register_post_accumulate_grad_hook(f)      f(p)
        at the end of the backward, when every ``p.grad`` is what an optimizer would find: this
        rank's shard of the mean over ranks. So an optimizer may step in the hook ("fused into the
        backward"). In no_sync() nothing is reduced, and no such hook is called.

An optimizer in a hook saves no memory here: the gradients of all units are stored together.
"""

import torch
from torch import Tensor

from minifsdp.unit import Unit


def change_gradient(unit: Unit, grad: Tensor) -> Tensor:
    """Let the hooks of a unit's flat parameter see and replace a gradient before it is reduced.

    Args:
        grad: ``[padded_numel]``, of ``unit.unsharded.flat_param``; may be overwritten.

    Returns:
        The gradient to go on with, of the same shape and dtype.

    Raises:
        RuntimeError: a hook raised one, or returned something of another shape.
    """
    hooks = unit.sharded_flat_param._backward_hooks
    if not hooks:
        return grad
    unpadded = grad[: unit.numel]  # padding belongs to no parameter, and a hook may count elements
    for hook in list(hooks.values()):  # a copy: a hook may remove itself
        try:
            with torch.no_grad():
                returned = hook(unpadded)
            unpadded = unpadded if returned is None else returned.view(unit.numel)
        except RuntimeError as error:
            raise RuntimeError(
                f"a hook that was registered on the flat parameter of unit {unit.label} failed: "
                f"{error}\nIt is called with this rank's gradient of the whole unit, of "
                f"{unit.numel} elements, before the reduction over ranks, and has to return one of "
                f"that shape or None. (The parameter itself is a shard, of "
                f"{unit.sharded_flat_param.numel()}. For what needs both, use "
                f"register_post_accumulate_grad_hook.)"
            ) from error
    grad[: unit.numel] = unpadded
    return grad


def after_gradient(unit: Unit) -> None:
    """Call the hooks that wait for the complete gradient of a unit's flat parameter."""
    param = unit.sharded_flat_param
    with torch.no_grad():
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)
        # torch.distributed.optim._apply_optimizer_in_backward puts its optimizers here. Its own
        # hook is on a node of a graph that this parameter is not in.
        for optimizer in getattr(param, "_in_backward_optimizers", ()):
            optimizer.step()
            param.grad = None

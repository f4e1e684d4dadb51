"""The gradient hooks that users register on flat parameters, or on the DTensors of units in rows.

torch calls such a hook when a gradient reaches the parameter. What users see, a shard, is in no
graph, so torch would never call its hooks. They are called here instead, at the moments at which
DistributedDataParallel calls them; where DDP has no good moment, as in training without ranks::

    p.register_hook(f)                           f(gradient) -> another gradient, or None
        before the reduction, with this rank's gradient of the whole unit, [numel]; in rows, of the
        whole parameter. What f does to each element by itself (scale, clamp, nan_to_num) has the
        same result as with DDP.

    p.register_post_accumulate_grad_hook(f)      f(p)
        at the end of the backward, when every ``p.grad`` is what an optimizer would find: this
        rank's shard of the mean over ranks. So an optimizer may step in the hook ("fused into the
        backward"). In no_sync() nothing is reduced, and no such hook is called.

An optimizer in a hook saves no memory here: the gradients of all units are stored together.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.comm.pieces import Pieces, whole
from minifsdp.core.layers import Layer
from minifsdp.core.reduce import Reduction
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.rows import Rows


class GradientHooks(Layer):
    """Calls the hooks that users have registered. The last of all layers: such a hook may be an
    optimizer, or raise."""

    def __init__(self) -> None:
        self._complete: Sequence[FeaturedUnit] = ()

    def gradient(self, unit: FeaturedUnit, grad: Tensor | Pieces) -> Tensor | Pieces:
        """Before the reduction.

        Raises:
            RuntimeError: the gradient is to be differentiated itself; or a hook has failed.
        """
        if grad.requires_grad:
            raise RuntimeError(
                f"unit {unit.label}: gradients of gradients (create_graph=True) are not supported, "
                f"because the reduction over ranks cannot be differentiated."
            )
        for param in unit.optimized_params:
            if param._backward_hooks:
                return change_gradient(unit, grad)
        return grad

    def complete(self, reductions: Sequence[Reduction]) -> None:
        """Call no hook yet: ranks may still read what an optimizer in a hook would change."""
        self._complete = [reduction.unit for reduction in reductions]

    def reset(self) -> None:
        """That backward has failed after all: what another layer had to do has raised."""
        self._complete = ()

    def idle(self, graph: bool) -> None:
        """At the end of the backward."""
        complete, self._complete = self._complete, ()
        for unit in complete:
            after_gradient(unit)


def change_gradient(unit: FeaturedUnit, grad: Tensor | Pieces) -> Tensor:
    """Let the hooks of a unit's parameters see and replace a gradient before it is reduced.

    Args:
        grad: ``[trained_numel]``, of ``unit.unsharded.flat_param``; may be overwritten if it is in
            one piece.

    Returns:
        The gradient to go on with, of the same shape and dtype.

    Raises:
        RuntimeError: a hook raised one, or returned a tensor with another number of elements.
    """
    grad = whole(grad)
    # Padding belongs to no parameter, and a hook may count elements.
    parts, unused = [grad[: unit.numel]], []
    if isinstance(unit.layout, Rows):
        parts = unit.layout.unflatten(grad)
        unused = unit.layout.unused(grad) if unit.has_unused else []  # torch would not call them
    for number, (param, part) in enumerate(zip(unit.optimized_params, parts, strict=True)):
        if part is not None and param._backward_hooks and number not in unused:
            part.copy_(_changed(unit, param, part))
    return grad


def _changed(unit: FeaturedUnit, param: nn.Parameter, grad: Tensor) -> Tensor:
    """What the hooks of ``param`` make of its gradient on this rank."""
    hooks: Any = param._backward_hooks
    for hook in list(hooks.values()):  # a copy: a hook may remove itself
        try:
            with torch.no_grad():
                returned = hook(grad)
            grad = grad if returned is None else returned.view(grad.shape)
        except RuntimeError as error:
            whole = "unit" if unit.mesh is None else "parameter"
            raise RuntimeError(
                f"a hook that was registered on a {'flat ' * (unit.mesh is None)}parameter of unit "
                f"{unit.label} failed: {error}\nIt is called with this rank's gradient of the "
                f"whole {whole}, of {grad.numel()} elements, before the reduction over ranks, and "
                f"has to return one of the shape {list(grad.shape)} or None. (The parameter itself "
                f"is a shard. For what needs both, use register_post_accumulate_grad_hook.)"
            ) from error
    return grad


def after_gradient(unit: FeaturedUnit) -> None:
    """Call the hooks that wait for the complete gradient of a unit's parameters."""
    for param in unit.optimized_params:
        # torch.distributed.optim._apply_optimizer_in_backward puts its optimizers there. It has put
        # its own hook on a node of a graph that this parameter is not in.
        hooks: Any = param._post_accumulate_grad_hooks
        optimizers = getattr(param, "_in_backward_optimizers", ())
        if not hooks and not optimizers:
            continue  # as a rule
        if param.requires_grad and param.grad is not None:  # in rows some may be frozen
            with torch.no_grad():
                for hook in list((hooks or {}).values()):
                    hook(param)
                for optimizer in optimizers:
                    optimizer.step()
                    param.grad = None

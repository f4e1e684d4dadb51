"""Calls that are right, but not here or not now."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minifsdp.comm.pieces import Pieces
from minifsdp.unit import Unit


def check_root_and_idle(unit: Unit, root: Unit, idle: bool, method: str) -> None:
    """Refuse a method that concerns all units, between steps.

    Args:
        idle: whether no forward and no backward is running.

    Raises:
        RuntimeError: ``unit`` is not the root's; or a forward or backward is running.
    """
    if unit is not root:
        raise RuntimeError(
            f"{method} was called on unit {unit.label}, which is inside of another. Call it on the "
            f"outermost FullyShardedDataParallel: it concerns all units together."
        )
    if not idle:
        raise RuntimeError(f"{method} was called in a forward or backward; call it between.")


def check_summoned(unit: Unit, units: Sequence[Unit], as_dtensors: bool) -> None:
    """Refuse to train inside of summon_full_params, and to compute inside of as_dtensors.

    Args:
        unit: the one that was called.
        units: all of its root.
        as_dtensors: whether DTensors are in the place of parameters.

    Raises:
        RuntimeError: they are; or some units are trained, and gradients are on.
    """
    if as_dtensors:
        raise RuntimeError(
            f"unit {unit.label} was called inside as_dtensors, which shows parameters in the form "
            f"of checkpoints. Leave the block first."
        )
    trained = any(one.sharded_flat_param.requires_grad for one in units)
    if trained and torch.is_grad_enabled():
        raise RuntimeError(
            f"unit {unit.label} was called inside summon_full_params with gradients enabled. They "
            f"would reach parameters that are there for the time of the block only. Leave the "
            f"block first, since forward gathers by itself; or use torch.no_grad()."
        )


def check_backward_outside(summoned: Iterable[Unit]) -> None:
    """Raises RuntimeError: a backward begins where the parameters of units are out."""
    if labels := ", ".join(unit.label for unit in summoned):
        raise RuntimeError(
            f"backward() was called inside summon_full_params or as_dtensors, which have taken out "
            f"the parameters of {labels}. A backward gathers them itself, and frees them. Leave "
            f"the block first."
        )


def refuse_mixed(unit: Unit, units: Sequence[Unit], error: RuntimeError) -> None:
    """Name the units where torch refuses an operation that got a DTensor: between a step and the
    next forward of its unit, a parameter in rows is one.

    Args:
        unit: in whose forward ``error`` was raised.
        units: all of its root.

    Raises:
        RuntimeError: ``error`` is that refusal.
    """
    if "got mixed torch.Tensor and DTensor" in str(error):
        inside = [u.label for u in units if unit in u.ancestors and not u.uses_unsharded_views]
        raise RuntimeError(
            f"an operation in the forward of unit {unit.label} got a parameter that is sharded now "
            f"(torch says: {str(error).split(',')[0]}). The parameters of the units inside of it "
            f"({', '.join(inside)}) are there while the module of that unit is called. If the "
            f"module around one computes with them itself, as nn.MultiheadAttention does with its "
            f"out_proj, let both be one unit."
        ) from error


def check_in_backward(graph_task: int) -> None:
    """Raises RuntimeError: something that autograd has saved is read while no backward runs."""
    if graph_task < 0:
        raise RuntimeError(
            "a parameter that autograd has saved was asked for outside of a backward. It is "
            "sharded then; read it inside of FSDP.summon_full_params(model)."
        )


def check_unchanged(unit: Unit, version: int) -> None:
    """Raises RuntimeError: the shard has another version than it had in the forward, so there was a
    step between a forward and its backward."""
    if unit.sharded_flat_param._version != version:
        raise RuntimeError(
            f"the parameters of unit {unit.label} were changed in place (by an optimizer?) between "
            f"a forward and its backward, so its gradients would be wrong. Call backward() for "
            f"every forward before you step."
        )


def check_one_step(unit: Unit, version: int, first: int) -> None:
    """Refuse a backward through graphs from before and after a step: it would compute the gradients
    of both with the parameters that are gathered for one of them.

    Args:
        version: of the shard, in the forward whose graph the backward has come to.
        first: in the forward of this unit whose graph it came to first.

    Raises:
        RuntimeError: the two differ.
    """
    if version != first:
        raise RuntimeError(
            f"one backward goes through two forwards of unit {unit.label}, and between them its "
            f"parameters were changed in place (by an optimizer?). The values that the first one "
            f"has computed with are gone, so its gradients would be wrong. Call backward() for "
            f"every forward before you step."
        )


def check_first_order(unit: Unit, grad: Tensor | Pieces) -> None:
    """Raises RuntimeError: the gradient is to be differentiated itself."""
    if grad.requires_grad:
        raise RuntimeError(
            f"unit {unit.label}: gradients of gradients (create_graph=True) are not supported, "
            f"because the reduction over ranks cannot be differentiated."
        )

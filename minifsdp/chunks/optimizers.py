"""Which optimizers are right for flat parameters. The others would be wrong silently.

An optimizer that treats each element by itself, as SGD, Adam and most others do, does the same to a
chunk as it would do to the whole parameter. These cases are different, and are found when the
optimizer is built or at its first step:

============================================  =====================================================
an optimizer that looks at whole tensors      refused, by the name of its class. If a name says
(Adafactor, Muon, LAMB) or at all             nothing, the optimizer is taken to be element-wise,
parameters together (LBFGS)                   because there is no way to find out. In rows
                                              it gets DTensors, and is refused if torch's
                                              DTensor cannot do what it does
an optimizer that holds parameters from       refused: nothing computes with those any more
before the wrapping, or from a block that
had shown full parameters
its state, loaded by a rank with a different  refused, see optim_state.py
chunk
parameter groups by name or by dimension:     warned of: a flat parameter is all of a unit's
"no weight decay for biases"                  parameters, has one dimension and no such names, so
                                              all of them end up in the same group
a step without any gradient                   warned of: ``loss.backward(inputs=...)`` does not
                                              reach flat parameters
============================================  =====================================================

A step itself only compares the list of parameter groups with that of the last step, and looks for
one gradient. All else runs only if the groups have changed.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Sized
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.chunks import optim_state
from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.core.unit_state import TrainingState
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.support.divided_param import is_optimized, unit_of_param
from minifsdp.wrapping.orig_params import unit_of_full_param, unit_of_orig_param

Groups = list[dict[str, Any]]

# Parts of the names of classes, in lower case. By tensor: adafactor and others divide by a norm of
# the whole tensor, or treat it as a matrix, which a flat parameter is not. By model: all parameters
# share one number, such as a step length, for which each rank would find its own value.
_BY_TENSOR = re.compile(
    "adafactor|muon|lamb(?!da)|lars|shampoo|soap|novograd|adam_?mini|galore|^came|sm3|kfac"
)
_BY_MODEL = re.compile("lbfgs|prodigy|dadapt|^sam$|zeroredundancy|localsgd")
_NOT_OF_DTENSORS = (torch.optim.Adafactor, torch.optim.LBFGS)
# These compute with torch.view_as_real(param), which is a copy if param is a DTensor that ranks do
# not divide evenly. What they write to it is lost, and no error says so.
_AS_REAL = re.compile("Adadelta|Adagrad|AdamW?|Adamax|ASGD|NAdam|RAdam|RMSprop|Rprop")
_INSIDE = re.compile(r"torch\.|minifsdp\.")


@cache
def watch_optimizers() -> None:
    """Check all optimizers of this process from now on: when they are built, and before a step."""
    register_optimizer_step_pre_hook(_before_step)
    FlatParameter.on_optimizer = staticmethod(_being_built)


def _being_built(optimizer: Optimizer, frame: FrameType) -> None:
    """Called when an optimizer reads a flat parameter in its ``add_param_group``.

    Args:
        frame: of ``add_param_group``.

    Raises:
        RuntimeError: the optimizer does not treat each element by itself.
    """
    added = frame.f_locals["param_group"]
    if optimizer.__dict__.get("_minifsdp_added") is added:
        return  # for another parameter of the same group
    optimizer.__dict__["_minifsdp_added"] = added
    given: Groups = [*optimizer.param_groups, added]
    _refuse_by_name(optimizer, given)
    optim_state.refuse_distributed_checkpoints(optimizer, given)
    # The constructor adds the groups one by one. To warn of them, find all that it was given.
    caller: FrameType | None = frame
    while caller is not None and caller.f_code is not Optimizer.__init__.__code__:
        caller = caller.f_back
    if caller is not None:
        given = caller.f_locals["param_groups"]
    if all(isinstance(group["params"], (Sized, torch.Tensor)) for group in given):
        _warn_of_groups(optimizer, given)  # an iterator would be used up by looking at it


@never_compile_inside
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Called before each step of any optimizer.

    Raises:
        RuntimeError: the step would be wrong. If the reason is on one rank only, all ranks that
            share parameters of this optimizer raise.
    """
    groups: Groups = optimizer.param_groups
    if _has_no_gradient(groups) and "_minifsdp_idle" not in optimizer.__dict__:
        optimizer.__dict__["_minifsdp_idle"] = True
        warnings.warn(
            f"{type(optimizer).__name__} is about to step, the model has run, and none of its "
            f"parameters has a gradient. loss.backward(inputs=model.parameters()) does not reach "
            f"them: call loss.backward(), and freeze what should get no gradient.",
            stacklevel=3,
        )
    seen = optimizer.__dict__.get("_minifsdp_seen", [])
    if len(seen) == len(groups) and all(
        group is before and group["params"] is params
        for group, (before, params) in zip(groups, seen, strict=True)
    ):
        return
    for group in groups:
        if "param_names" in group:  # of model.named_parameters(); torch.load takes plain strings
            group["param_names"] = [str(name) for name in group["param_names"]]
    _refuse_by_name(optimizer, groups)
    wrong = _originals(optimizer, groups)
    for group in groups:
        if not any(group is before for before, _ in seen):  # new; load_state_dict() makes new ones
            wrong = wrong or optim_state.check_state(optimizer, group)
    optim_state.agree(wrong, groups)
    _warn_of_groups(optimizer, groups)
    _choose_kernels(groups)
    optim_state.mark_groups(groups)
    optim_state.refuse_distributed_checkpoints(optimizer, groups)
    optimizer.__dict__["_minifsdp_seen"] = [(group, group["params"]) for group in groups]


def _choose_kernels(groups: Groups) -> None:
    """Let torch take a kernel for each parameter (``foreach=False``) where a group has DTensors and
    others: of units in rows and in chunks, or ignored ones. Otherwise torch would take kernels for
    many tensors at a time on GPUs, which refuse the mixture."""
    for group in groups:
        kinds = {isinstance(param, DTensor) for param in group["params"]}
        if len(kinds) > 1 and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = False


def _has_no_gradient(groups: Groups) -> bool:
    """Whether a forward has run, its backward has not reached any of these units, and none of
    their parameters has a gradient from before. (Of a unit in rows some may be unused.)"""
    ran = False
    for group in groups:
        for param in group["params"]:
            unit = unit_of_param(param)
            if unit is not None and param.requires_grad:
                if param.grad is not None:
                    return False  # usually the first parameter has one, so this loop is short
                if not ran and unit.state.training is TrainingState.FORWARD:
                    ran = all(other.grad is None for other in unit.optimized_params)
    return ran


def _refuse_by_name(optimizer: Optimizer, groups: Groups) -> None:
    if isinstance(optimizer, _NOT_OF_DTENSORS) and any(
        isinstance(param, DTensor) and is_optimized(param)
        for group in groups
        for param in _tensors(group["params"])
    ):
        raise RuntimeError(
            f"{type(optimizer).__name__} computes with parameters in ways that torch's DTensor "
            f"does not know, and the model's parameters are DTensors. Use one that treats each "
            f"element by itself, as SGD, AdamW, Adagrad or RMSprop do, or torch.optim.Muon for "
            f"matrices."
        )
    if any(_AS_REAL.fullmatch(cls.__name__) for cls in type(optimizer).__mro__) and any(
        isinstance(param, DTensor) and param.is_complex() and is_optimized(param) and _uneven(param)
        for group in groups
        for param in _tensors(group["params"])
    ):
        raise RuntimeError(
            f"{type(optimizer).__name__} views a complex parameter as real numbers. Of a DTensor "
            f"whose dimension the ranks do not divide evenly torch gives it a copy, so the "
            f"parameter would not be trained. Keep it in real numbers (torch.view_as_real in "
            f"__init__, torch.view_as_complex in forward), ignore it, or use "
            f"FullyShardedDataParallel without use_orig_params, or SGD."
        )
    # Base classes too: a subclass of LBFGS is an LBFGS, whatever its name is.
    flat = [param for group in groups for param in _flat(group["params"])]
    # It depends on the parameters, too: where each rank has the whole of one vector, even Adafactor
    # is right, and LBFGS is right where nothing is cut into chunks.
    looks_at = ""
    for cls in type(optimizer).__mro__:
        name = cls.__name__.lower()
        if _BY_TENSOR.search(name) and any(_is_flattened(param) for param in flat):
            looks_at = "whole parameters, in their own shapes; a unit's are laid end to end in one"
        elif _BY_MODEL.search(name) and any(param.is_sharded for param in flat):
            looks_at = "all parameters together; each rank has other chunks of them"
        if looks_at:
            raise RuntimeError(
                f"{type(optimizer).__name__} looks at {looks_at}, so its steps would be wrong for "
                f"a sharded model. Use one that treats each element by itself, as SGD, AdamW, "
                f"Adagrad or RMSprop do. With use_orig_params=True an optimizer gets a DTensor for "
                f"each parameter, and more of them are right."
            )


def _uneven(param: DTensor) -> bool:
    return any(
        isinstance(placement, Shard) and param.shape[placement.dim] % param.device_mesh.size(at)
        for at, placement in enumerate(param.placements)
    )


def _is_flattened(param: FlatParameter) -> bool:
    """Whether a flat parameter differs in shape from the parameters that it was made of. Only a
    single vector, whole on each rank, keeps its shape."""
    unit = param.unit()
    return unit is not None and (
        param.is_sharded
        or len(unit.param_infos) > 1
        or any(len(info.shape) > 1 for info in unit.param_infos)
    )


def _originals(optimizer: Optimizer, groups: Groups) -> str | None:
    """What is wrong with the parameters that an optimizer holds, in words; None if nothing is."""
    for group in groups:
        for param in group["params"]:
            unit, name = unit_of_orig_param(param)
            if unit is not None:
                return (
                    f"an optimizer ({type(optimizer).__name__}) holds {name!r} of unit "
                    f"{unit.label} as it was before wrapping. Wrapping has replaced it by a "
                    f"flat parameter, so a step would change nothing that anybody computes with. "
                    f"Build the optimizer (or its group) from the wrapped model's parameters()."
                )
            unit, name = unit_of_full_param(param)
            if unit is not None:
                return (
                    f"an optimizer ({type(optimizer).__name__}) holds {name!r} of unit "
                    f"{unit.label} as summon_full_params (or unshard, or as_dtensors) has shown "
                    f"it. That block has ended, so a step would change nothing that anybody "
                    f"computes with. Build the optimizer (or its group) outside of the block, from "
                    f"the model's parameters(). With fully_shard or use_orig_params=True these "
                    f"have names and shapes there, too."
                )
            old = param.unit() if isinstance(param, FlatParameter) else None
            if old is not None and old.numel and old.sharded_flat_param is not param:
                return (
                    f"an optimizer ({type(optimizer).__name__}) holds a flat parameter of unit "
                    f"{old.label} that has been replaced since, by model.to() or the like. Build "
                    f"the optimizer after that, from the model's parameters()."
                )
    return None


def _warn_of_groups(optimizer: Optimizer, groups: Groups) -> None:
    """Warn, once, if parameter groups look as if they were chosen by name or by dimension: the flat
    parameters are all in one of them, and another one is empty or has only what is not sharded."""
    if len(groups) < 2 or "_minifsdp_warned" in optimizer.__dict__:
        return
    flat = [list(_flat(group["params"])) for group in groups]
    full = [at for at, params in enumerate(flat) if params]
    empty = [at for at, group in enumerate(groups) if not len(_tensors(group["params"]))]
    # A group of flat parameters and one of plain parameters are no mistake. But both kinds in one
    # group, and more plain ones in another, look like a filter that all flat ones have passed.
    filtered = len(full) == 1 and len(flat[full[0]]) < len(_tensors(groups[full[0]]["params"]))
    if not full or not (empty or filtered):
        return
    optimizer.__dict__["_minifsdp_warned"] = True
    labels = [param.unit().label for param in flat[full[0]] if param.unit() is not None]
    units = ", ".join(labels[:3]) + ", ..." * (len(labels) > 3)
    warnings.warn(
        f"{type(optimizer).__name__} was given {len(groups)} parameter groups; "
        + (f"number {empty[0]} is empty, and " if empty else "")
        + f"number {full[0]} has the flat parameters of units {units}. Each of these is "
        f"all parameters of its unit laid end to end: it has one dimension, and no name such as "
        f"'bias' or 'norm'. If the groups are by name or by dimension (no weight decay for biases "
        f"and norms, say), one group's settings now hold for all. Wrap with use_orig_params=True, "
        f"and groups are as in a plain model; or wrap in units of their own what should differ.",
        stacklevel=_caller(),
    )


def _caller() -> int:
    """How many frames up the code of the user is, so that a warning shows its line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _INSIDE.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _flat(params: Any) -> Iterable[FlatParameter]:
    return (param for param in _tensors(params) if isinstance(param, FlatParameter))


def _tensors(params: Any) -> list[Any]:
    """The parameters of a group, which may be given as one tensor, or with names as pairs."""
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    return [param[1] if isinstance(param, tuple) else param for param in params]

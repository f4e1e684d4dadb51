"""Optimizers of flat parameters: which are right, and which would be wrong without a word.

An optimizer that treats each element by itself (SGD, Adam and most others) does to a chunk what it
would do to the whole. These do not, and are told when they are built, or at their first step:

- One that looks at a whole tensor (Adafactor, Muon, LAMB), or at all of them (LBFGS). They are
  known by the names of their classes. An optimizer whose name says nothing is taken to be
  element-wise; nobody can see that it is not.
- One that holds parameters from before the wrapping, in which nobody computes any more.
- Groups by name or by dimension: "no weight decay for biases". A flat parameter is all of a unit's
  parameters, has one dimension, and no names, so they all land in one group. That is a warning.
- Its state, in the hands of a rank with another chunk: see optim_state.py.
- A step without any gradient, since ``loss.backward(inputs=...)`` does not reach flat parameters.
  That is a warning, too.

All of it is looked at again when the groups change, and not in every step.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Sized
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.checks.optim_state import (
    agree,
    check_state,
    mark_groups,
    refuse_distributed_checkpoints,
)
from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.unit_state import TrainingState
from minifsdp.wrapping.orig_params import unit_of_orig_param

Groups = list[dict[str, Any]]

# Parts of class names, small letters only.
_BY_TENSOR = re.compile(
    "adafactor|muon|lamb(?!da)|lars|shampoo|soap|novograd|adam_?mini|galore|^came|sm3|kfac"
)
_BY_MODEL = re.compile("lbfgs|prodigy|dadapt|^sam$|zeroredundancy|localsgd")
_INSIDE = re.compile(r"torch\.|minifsdp\.")


@cache
def watch_optimizers() -> None:
    """Look at all optimizers from now on: when they are built, and before they step."""
    register_optimizer_step_pre_hook(_before_step)
    FlatParameter.on_optimizer = staticmethod(_being_built)


def _being_built(optimizer: Optimizer, frame: FrameType) -> None:
    """An optimizer has asked for a flat parameter, in its ``add_param_group``."""
    added = frame.f_locals["param_group"]
    if optimizer.__dict__.get("_minifsdp_added") is added:
        return  # another one of the same group
    optimizer.__dict__["_minifsdp_added"] = added
    given: Groups = [*optimizer.param_groups, added]
    _refuse_by_name(optimizer, given)
    refuse_distributed_checkpoints(optimizer, given)
    caller: FrameType | None = frame
    while caller is not None and caller.f_code is not Optimizer.__init__.__code__:
        caller = caller.f_back
    if caller is not None:
        given = caller.f_locals["param_groups"]
    if all(isinstance(group["params"], (Sized, torch.Tensor)) for group in given):
        _warn_of_groups(optimizer, given)  # else some are iterators yet, not to be used up


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step before it is made. Costs one comparison for each group, if none has changed.

    Raises:
        RuntimeError: on every rank, whichever found the reason.
    """
    groups: Groups = optimizer.param_groups
    if _has_no_gradient(groups) and "_minifsdp_idle" not in optimizer.__dict__:
        optimizer.__dict__["_minifsdp_idle"] = True
        warnings.warn(
            f"{type(optimizer).__name__} is about to step, the model has run, and none of its flat "
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
    _refuse_by_name(optimizer, groups)
    wrong = _originals(optimizer, groups)
    for group in groups:
        if not any(group is before for before, _ in seen):  # new, or put here by load_state_dict()
            wrong = wrong or check_state(optimizer, group)
    agree(wrong, groups)
    _warn_of_groups(optimizer, groups)
    mark_groups(groups)
    refuse_distributed_checkpoints(optimizer, groups)
    optimizer.__dict__["_minifsdp_seen"] = [(group, group["params"]) for group in groups]


def _has_no_gradient(groups: Groups) -> bool:
    """Whether a forward was run for a backward, and has left nothing to step with."""
    ran = False
    for group in groups:
        for param in group["params"]:
            if isinstance(param, FlatParameter) and param.requires_grad:
                if param.grad is not None:
                    return False  # as a rule the first one has
                unit = param.unit()
                ran = ran or (unit is not None and unit.state.training is TrainingState.FORWARD)
    return ran


def _refuse_by_name(optimizer: Optimizer, groups: Groups) -> None:
    flat = [param for group in groups for param in _flat(group["params"])]
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
                f"Adagrad or RMSprop do."
            )


def _is_flattened(param: FlatParameter) -> bool:
    """Whether it is something else than one parameter that has one dimension anyway."""
    unit = param.unit()
    return unit is not None and (
        param.is_sharded
        or len(unit.param_infos) > 1
        or any(len(info.shape) > 1 for info in unit.param_infos)
    )


def _originals(optimizer: Optimizer, groups: Groups) -> str | None:
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
            old = param.unit() if isinstance(param, FlatParameter) else None
            if old is not None and old.numel and old.sharded_flat_param is not param:
                return (
                    f"an optimizer ({type(optimizer).__name__}) holds a flat parameter of unit "
                    f"{old.label} that has been replaced since, by model.to() or the like. Build "
                    f"the optimizer after that, from the model's parameters()."
                )
    return None


def _warn_of_groups(optimizer: Optimizer, groups: Groups) -> None:
    """Say, once, that groups by name or dimension have all become one."""
    if len(groups) < 2 or "_minifsdp_warned" in optimizer.__dict__:
        return
    flat = [list(_flat(group["params"])) for group in groups]
    full = [at for at, params in enumerate(flat) if params]
    empty = [at for at, group in enumerate(groups) if not len(_tensors(group["params"]))]
    # A model and something plain beside it are no mistake; both in one group, and more that is
    # plain in another, look like a filter that has let all flat parameters through.
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
        f"and norms, say), one group's settings now hold for all. Wrap in units of their own what "
        f"should be treated differently, and make the groups of those units' parameters().",
        stacklevel=_caller(),
    )


def _caller() -> int:
    """How many frames up the code is that is neither torch's nor this file."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _INSIDE.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _flat(params: Any) -> Iterable[FlatParameter]:
    return (param for param in _tensors(params) if isinstance(param, FlatParameter))


def _tensors(params: Any) -> list[Any]:
    """A group's parameters, which may be one, or pairs of a name and one."""
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    return [param[1] if isinstance(param, tuple) else param for param in params]

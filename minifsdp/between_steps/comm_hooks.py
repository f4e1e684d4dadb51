"""Communication hooks: other ways to average gradients over ranks.

A hook is called with the gradient of a unit when that is complete, and does what reduce.py would
have done. Its arguments are those of torch's hooks for FSDP1::

    hook(state, gradient, shard)     sharded:  gradient [world_size * n], shard [n] to be written
    hook(state, gradient)            NO_SHARD: gradient [n], to be averaged in place

``shard`` is this rank's part of the result. In ``gradient`` the part of rank 0 comes first, then
that of rank 1, and so on, with zeros where a part is padded. Both have ``reduce_dtype``. A hook may
give ``shard.data`` another dtype. On a CPU the backward waits until the hook returns.

torch's own hooks do what minifsdp does without one, in another dtype. So they are not called. The
dtype is set instead, and the reduction goes on while the backward computes::

    fp16_compress_hook, bf16_compress_hook     reduce_dtype is float16, bfloat16
    allreduce_hook, reduce_scatter_hook        nothing changes

This holds if ``state.process_group`` has the ranks that share the unit. Otherwise they are called.

Source: ``torch.distributed.algorithms._comm_hooks.default_hooks`` (pytorch 2.13).
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks import default_hooks

from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.comm.blocks import together
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.core.streams import Finish
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.strategies import choose_strategies

Hook = Callable[..., None]
_DTYPES: dict[Any, torch.dtype | None] = {
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
    default_hooks.reduce_scatter_hook: None,
    default_hooks.allreduce_hook: None,
}
_registered: "WeakKeyDictionary[FeaturedUnit, Hook]" = WeakKeyDictionary()


def register_comm_hook(engine: FeaturedEngine, state: object, hook: Hook) -> None:
    """Reduce the gradients of all units with ``hook`` from now on.

    Args:
        state: handed to the hook; minifsdp reads only ``state.process_group`` of it.

    Raises:
        RuntimeError: there has been a step, so that the ranks have compared their settings already;
            or a unit has a hook already.
        TypeError: ``hook`` cannot be called with the arguments that a unit's strategy needs.
        ValueError: a unit has a hybrid strategy.
    """
    if engine.layer(RankAgreement).steps:
        raise RuntimeError(
            "register_comm_hook was called after the first step. Call it before, since the ranks "
            "compare their settings in the first step."
        )
    for unit in engine.units:
        _check(unit, hook)
    for unit in engine.units:
        _registered[unit] = hook
        if hook in _DTYPES and _same_ranks(unit, getattr(state, "process_group", None)):
            dtype = _DTYPES[hook] or unit.precision.reduce_dtype
            unit.precision = replace(unit.precision, reduce_dtype=dtype)
        else:
            unit.comm_hook = HookStage(state, hook)
    choose_strategies(engine.units, engine.streams)


def _check(unit: FeaturedUnit, hook: Hook) -> None:
    if unit in _registered:
        raise RuntimeError(
            f"register_comm_hook was called with {_name(hook)}, but unit {unit.label} has "
            f"{_name(_registered[unit])} already. There can be one for each model."
        )
    if unit.shard_group is not None and unit.replicate_group is not None:
        raise ValueError(
            f"unit {unit.label} has a hybrid strategy, which reduces in two groups of ranks. A "
            f"communication hook is for one group, as in torch."
        )
    if not callable(hook):
        raise TypeError(f"a communication hook is a function, not {hook!r}")
    wanted = ["state", "gradient"] + ["shard"] * (unit.shard_group is not None)
    try:
        inspect.signature(hook).bind(*wanted)
    except TypeError as error:
        raise TypeError(
            f"the communication hook {_name(hook)} cannot be called with ({', '.join(wanted)}), "
            f"as unit {unit.label} needs it: {error}. Hooks for sharded units take a shard, and "
            f"those for NO_SHARD do not."
        ) from None


def _same_ranks(unit: FeaturedUnit, group: Any) -> bool:
    own = unit.shard_group or unit.replicate_group
    ranks = dist.get_process_group_ranks
    return group is not None and own is not None and ranks(group) == ranks(own)


class HookStage:
    """The stage of a reduction that calls a hook. It is over when the hook returns.

    Attributes:
        name: of the hook. By these names the ranks compare what they have registered.
    """

    stream, travels, on_host = "reduce", True, False

    def __init__(self, state: object, hook: Hook) -> None:
        self._state, self._hook, self.name = state, hook, _name(hook)

    def launch(self, unit: FeaturedUnit, value: Tensor | Pieces) -> tuple[Tensor, Finish]:
        """From a gradient as the unit has it, ``[trained_numel]``, to this rank's shard of the
        mean. The shard has its values already, so the ``finish`` that is returned does nothing."""
        # A tensor of its own. A hook may set ``data``, as torch's compression does, and a GPU may
        # still be reading what was there: ``value`` keeps that memory until it is read.
        grad, group = whole(value).detach(), unit.shard_group
        unit.has_unused = False  # a hook may do anything, also to the marks of unused parameters
        if group is None:
            self._hook(self._state, grad)
            return grad, lambda: None
        # In rows, the parts of one rank are not in one place. Hooks are written for chunks.
        sent = together(grad, unit.layout.trained_blocks, group.size())
        shard = grad.new_empty(grad.numel() // group.size())
        self._hook(self._state, sent, shard)
        return shard, lambda: None


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)

"""no_sync: gradients that are reduced later.

A program that accumulates gradients over several batches can reduce them once, and not each time::

    with model.no_sync():
        for batch in batches[:-1]:
            loss(model(batch)).backward()     # unsharded gradients stay on this rank
    loss(model(batches[-1])).backward()       # reduced together with these

This saves communication and costs memory: each rank has unsharded gradients, in the dtype of the
computation. During a second such backward it has two sets of them, until that backward succeeds.
(``fully_shard`` keeps them in ``reduce_dtype``, as torch's does: in float32 a sum over many batches
keeps bits that bfloat16 would lose, for twice the memory.)
Without ``no_sync`` the gradients of each batch are reduced and accumulated in shards. Both give the
same sums, and a program may use both.

An unreduced gradient cannot be in ``shard.grad``, because its shape differs. But ``zero_grad()``
has to clear it, as it clears any other gradient, and that changes only ``shard.grad``. So
``shard.grad`` is used as a mark: it is set to zeros if it was None, and the unreduced gradient is
valid for as long as the mark is not changed. A mark of zeros that was scaled has to be told from
one that was cleared, so its first element is -0: multiplied by a positive number it stays -0, and
``zero_grad()`` makes it 0.

No optimizer steps in such a block. So units that stay gathered from forward to backward
(SHARD_GRAD_OP) stay for the next forward as well. Other units do so if a program asks for it
(``set_reshard_after_backward(False)``).

With hybrid sharding a program may have gradients reduced in the shard group, and the sum
all-reduced later (``set_requires_all_reduce(False)``). Then a part of the gradient waits on each
rank, in the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from minifsdp.comm.pieces import Pieces, whole
from minifsdp.core.layers import Call, Layer
from minifsdp.core.reduce import ReduceScatter, Reduction
from minifsdp.core.streams import Finish
from minifsdp.core.unit_state import STRATEGY, Purpose
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit, UnreducedGrad
from minifsdp.support.divided_param import count_cleared
from minifsdp.support.shard_changes import was_moved

NO_SYNC = "a backward in no_sync"  # a reason to stay, and one for a gradient to wait

_units: "WeakSet[FeaturedUnit]" = WeakSet()  # that have had an unreduced gradient


class NoSync(Layer):
    """Whether the backwards of one root reduce gradients.

    Attributes:
        unreduced: the units whose gradients they leave on this rank.
    """

    def __init__(self, engine: FeaturedEngine) -> None:
        self.units, self._gradients = engine.units, engine.gradients
        self.unreduced = set[FeaturedUnit]()
        self._were_unreduced = set[FeaturedUnit]()  # in the last backward
        # A new root around these units takes over the gradients that they have left.
        self._used = any(unit.unreduced_grad is not None for unit in self.units)
        self._versions: dict[FeaturedUnit, int] = {}  # of shards, when their units were held
        # The parameters of units without an all-reduce that had no gradient before this backward.
        self._cleared: dict[FeaturedUnit, Sequence[int]] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Backwards in this block leave their gradients on this rank."""
        before, self.unreduced = self.unreduced, {*self.units}
        try:
            yield
        finally:
            self.unreduced = before

    def begin_to_use(self) -> None:
        """From now on look at units when a backward begins."""
        self._used = True

    def start(self, purpose: Purpose) -> None:
        """Units that were kept stay in a forward, if their shards have not changed since. Raises
        RuntimeError: see :func:`check_unreduced_grad`."""
        if self._used and purpose is Purpose.LOOK:  # before a backward it is done when that starts
            count_cleared(self.units)
        for unit in self.units if self._used else ():
            if NO_SYNC in unit.reasons and (purpose is Purpose.LOOK or self._was_changed(unit)):
                unit.let_go(NO_SYNC)
            check_unreduced_grad(unit)

    def failed(self) -> None:
        """Nothing stays, and nothing waits: another root may have the units from now on."""
        self._were_unreduced = set()
        for unit in self.units:
            unit.waits.discard(NO_SYNC)
            unit.let_go(NO_SYNC)
            unit.parts.clear()

    def start_backward(self, call: Call | None) -> None:
        """Units are held here, where all ranks are alike, and not in their own backwards. Those may
        not run on all ranks, and then some ranks would gather a unit in the next forward that
        others have kept.

        Raises:
            RuntimeError: see :func:`check_unreduced_grad`.
        """
        self._used |= bool(self.unreduced)
        if not self._used:
            return
        count_cleared(self.units)
        for unit in self.units:
            check_unreduced_grad(unit)
            _stages_of_next(unit)
            if not unit.users_comm.all_reduces:
                self._cleared[unit] = _cleared(unit)
            if unit in self.unreduced:
                _check_whole(unit)
                unit.waits.add(NO_SYNC)
            elif unit in self._were_unreduced:
                unit.waits.discard(NO_SYNC)
            stays = unit in self.unreduced and not unit.reshard_after_forward
            if stays or not unit.reshard_after_backward:
                unit.hold(NO_SYNC)
                self._versions[unit] = unit.sharded_flat_param._version
            elif NO_SYNC in unit.reasons:
                unit.hold(STRATEGY)  # now it stays as after any other forward
                unit.let_go(NO_SYNC)
        self._were_unreduced = {*self.unreduced}

    def complete(self, reductions: Sequence[Reduction]) -> None:
        """Keep what was held in this backward. What earlier backwards left is reduced now."""
        for reduction in reductions:
            reduction.unit.unreduced_grad = None
            if reduction.unit.parts:
                self._keep_parts(reduction.unit)
        held = self._gradients.held
        while held:  # freed one after the other, since each may be replaced by a cast copy
            unit, grad = held.popitem()
            store_unreduced(unit, grad)

    def _keep_parts(self, unit: FeaturedUnit) -> None:
        """Keep what was reduced in the shard group alone."""
        while unit.parts:
            before = unit.unreduced_grad
            cleared = self._cleared.get(unit, ()) if before is None else before.cleared
            store_unreduced(unit, unit.parts.pop())
            assert unit.unreduced_grad is not None
            unit.unreduced_grad = unit.unreduced_grad._replace(cleared=cleared, is_scattered=True)

    def _was_changed(self, unit: FeaturedUnit) -> bool:
        """Whether the shard has changed since the unit was gathered from it."""
        return self._versions[unit] != unit.sharded_flat_param._version or was_moved(unit)


class AddUnreduced:
    """The first stage of a reduction (reduce.py), or the one after the reduce-scatter: adds what
    earlier backwards have left there. What they left stays as it is until this backward has
    succeeded. No attribute refers to it: after ``zero_grad()`` its memory is to be freed, and not
    to be kept until the next backward."""

    stream, travels, on_host = "reduce", False, False

    def __init__(self) -> None:
        self._added = False

    def launch(self, unit: FeaturedUnit, value: Tensor | Pieces) -> tuple[Tensor | Pieces, Finish]:
        """``value``: of the same shape as what was left; may be written to if it is a tensor.
        Returns the sum, in the wider dtype of the two; for a second gradient, ``value`` itself."""
        if unit.unreduced_grad is not None and not self._added:
            self._added = True
            grad = whole(value)
            unreduced = unit.unreduced_grad.grad
            value = grad.to(torch.promote_types(grad.dtype, unreduced.dtype)).add_(unreduced)
        return value, lambda: None


def _stages_of_next(unit: FeaturedUnit) -> None:
    """Let the reductions of a backward that begins add the unit's unreduced gradient, if it has
    one."""
    stages = [stage for stage in unit.stages if not isinstance(stage, AddUnreduced)]
    if unit.unreduced_grad is not None:
        names = [type(stage) for stage in stages]
        place = 1 + names.index(ReduceScatter) if unit.unreduced_grad.is_scattered else 0
        stages.insert(place, AddUnreduced())
    unit.stages = stages


def _check_whole(unit: FeaturedUnit) -> None:
    if unit.unreduced_grad is not None and unit.unreduced_grad.is_scattered:
        raise RuntimeError(
            f"unit {unit.label}: a backward without any reduction (no_sync, "
            f"set_requires_gradient_sync(False)) comes after one that has left out only the "
            f"all-reduce (set_requires_all_reduce(False)), and before both are reduced. Run the "
            f"backwards without any reduction first."
        )


def store_unreduced(unit: FeaturedUnit, grad: Tensor) -> None:
    """Keep a gradient on this rank until the next reduction, which adds it to its own.

    Args:
        grad: of ``unit.unsharded.flat_param``: ``[padded_numel]``, in its dtype. It is added to the
            unit's unreduced gradient, if there is one, and otherwise kept in
            ``unit.unreduced_dtype``. Or this rank's part, ``[padded_numel / ranks]``.
    """
    shard, cleared = unit.sharded_flat_param, _cleared(unit)
    if unit.unreduced_grad is not None:
        grad = unit.unreduced_grad.grad.add_(grad)
    elif unit.unreduced_dtype is not None:
        grad = grad.to(unit.unreduced_dtype)
    if shard.grad is None:
        shard.grad = torch.zeros_like(shard, dtype=shard.grad_dtype)
    elif unit.mesh is not None:
        shard.grad = shard.grad  # shown in each DTensor, also where one was cleared
    # Zeros that are scaled stay zeros, and would look as if they were cleared. But -0 stays -0.
    for first in _firsts(unit, shard.grad):
        first.masked_fill_(first == 0, -0.0)
    unit.unreduced_grad = UnreducedGrad(
        grad, shard.grad, _version(unit, shard.grad), shard._version, cleared
    )
    _units.add(unit)
    _watch_optimizers()


def _cleared(unit: FeaturedUnit) -> Sequence[int]:
    """The parameters that have no gradient, by their numbers. If no rank uses them, they must not
    get a gradient of zeros (rows.py)."""
    if unit.unreduced_grad is not None:
        return unit.unreduced_grad.cleared
    return [number for number, p in enumerate(unit.optimized_params) if p.grad is None]


def check_unreduced_grad(unit: FeaturedUnit) -> None:
    """Drop the unit's unreduced gradient if ``zero_grad()`` was called since it was stored. In rows
    call :func:`count_cleared` before.

    Raises:
        RuntimeError: the parameters were stepped, or the gradient changed, while a part of the
            gradient was not reduced.
    """
    unreduced, shard = unit.unreduced_grad, unit.sharded_flat_param
    if unreduced is None:
        return
    grad = shard.grad
    if grad is not unreduced.mark or _version(unit, grad) != unreduced.mark_version:
        if grad is None or not (grad.any() or any(f.signbit().any() for f in _firsts(unit, grad))):
            unit.unreduced_grad = None  # zero_grad(), with set_to_none=True or False
            return
        what = "its gradient was changed (scaled, clipped, by a penalty, cleared in part?)"
    elif shard._version != unreduced.shard_version:
        what = "its parameters were changed (by an optimizer, by summon_full_params?)"
    else:
        return
    raise _incomplete(unit, what)


def _version(unit: FeaturedUnit, grad: Tensor) -> int:
    """How often ``grad`` was changed in place, directly or through a DTensor that shows a part."""
    shown = (param.grad for param in unit.optimized_params)
    return grad._version + sum(g._version for g in shown if g is not None and g is not grad)


def _firsts(unit: FeaturedUnit, grad: Tensor) -> list[Tensor]:
    """The first element of each gradient that an optimizer sees, as a view, ``[1]`` or ``[0]``."""
    local = unit.layout.local_tensors(grad, unit.shard_rank)
    return [tensor.view(-1)[:1] for tensor in local if tensor is not None]


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)  # of all optimizers, until the process ends


@never_compile_inside
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Refuse a step with an incomplete gradient before it is made. After the step ``zero_grad()``
    would clear the mark, and the mistake could not be found."""
    waiting = [unit for unit in _units if unit.unreduced_grad is not None]
    if not waiting:
        return
    count_cleared(waiting)
    unit_of = {param: unit for unit in waiting for param in unit.optimized_params}
    params = (param for group in optimizer.param_groups for param in group["params"])
    for unit in dict.fromkeys(unit_of[param] for param in params if param in unit_of):
        check_unreduced_grad(unit)
        if unit.unreduced_grad is not None:
            raise _incomplete(unit, "an optimizer is about to step")


def _incomplete(unit: FeaturedUnit, what: str) -> RuntimeError:
    return RuntimeError(
        f"unit {unit.label}: {what} while gradients from no_sync() wait to be reduced, so "
        f"part of the sum is missing. Run the last backward before a step outside of "
        f"no_sync(), or drop these gradients with zero_grad()."
    )

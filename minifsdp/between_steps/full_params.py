"""Reading and changing whole parameters between steps.

Outside of its forward and backward a unit is a flat chunk without names. To look at
``layer.weight``, or to set it, all ranks gather it together::

    with FSDP.summon_full_params(model):
        print(model.layer.weight)       # the whole parameter, on every rank
        model.layer.weight.zero_()      # kept, in the shards, when the block ends

They come in the shards' own dtype, whatever is computed with; so do buffers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minifsdp.between_steps.unit_params import UnitParams
from minifsdp.checks.rank_agreement import Moment
from minifsdp.checks.same_model import remember_values
from minifsdp.comm.collectives import all_gather
from minifsdp.comm.message_tags import Kind
from minifsdp.hooks import Hooks
from minifsdp.offload import HOST
from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit
from minifsdp.unshard import wait_for_unshard


@dataclass(frozen=True)
class Options:
    """As in :meth:`FullyShardedDataParallel.summon_full_params`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


class Wrapper(Protocol):
    """What is needed of a ``FullyShardedDataParallel``."""

    _unit: Unit
    _hooks: Hooks


@contextmanager
def summon(wrappers: Sequence[Wrapper], options: Options) -> Iterator[None]:
    """Hold the full parameters of the wrappers' own units, which may have several roots."""
    by_root: dict[Hooks, list[Wrapper]] = {}
    for wrapper in wrappers:
        by_root.setdefault(wrapper._hooks, []).append(wrapper)
    with ExitStack() as stack:
        for hooks, below in by_root.items():
            units = [wrapper._unit for wrapper in below]
            stack.enter_context(full_params(hooks, units, options))
        yield


@contextmanager
def full_params(hooks: Hooks, units: list[Unit], options: Options) -> Iterator[None]:
    """Hold the full parameters of ``units``, under their own names, as ordinary parameters.

    Units that are out already, in a block around this one, are left to that.

    Args:
        hooks: of the root that the units belong to.

    Raises:
        RuntimeError: called in a forward or backward, which gather and free by themselves.
        ValueError: ``writeback`` and ``rank0_only``: the other ranks would have nothing to write.
    """
    hooks.state_dict_calls.close_dead()
    if not hooks.idle:
        raise RuntimeError(
            "summon_full_params was called in a forward or in a backward of this model (as "
            "state_dict, load_state_dict and apply do, too). Call it between steps."
        )
    if options.writeback and options.rank0_only:
        raise ValueError(
            "summon_full_params(rank0_only=True) needs writeback=False: each rank writes back its "
            "own chunk, and only rank 0 would have the parameters."
        )
    engine = hooks.engine
    if not hooks.summoned:
        hooks.backward.forget_failed()
        engine.start(None)
    if engine.sharded:  # else each rank has everything, and need not ask anybody
        engine.agreement.at(Moment.SUMMON_FULL_PARAMS_OF, engine.root)
    units = [unit for unit in units if unit not in hooks.summoned]
    shown = not options.rank0_only or all(_is_first(unit) for unit in units)
    hooks.summoned.update(units)
    out: list[UnitParams] = []
    try:
        for unit in units:
            whole = _take_out(hooks, unit, options, shown)
            if shown:
                whole.register()
                out.append(whole)
        yield
        if options.writeback:
            for whole in out:  # all, or none
                whole.check_shapes()
            for whole in out:
                if whole.write_back():
                    remember_values(whole.unit, fingerprint([whole.flat]))
                    engine.agreement.compare_values_again()
    finally:
        for whole in out:
            whole.unregister()
        for unit in units:
            hooks.summoned.discard(unit)
            engine.parameters.reshard(unit)
        for unit in engine.units if not hooks.summoned else ():
            unit.choose_precision(engine.training)  # there may be a backward to come


def _take_out(hooks: Hooks, unit: Unit, options: Options, shown: bool) -> UnitParams:
    with torch.no_grad():  # only while gathering: what the caller computes is his to decide
        hooks.engine.parameters.unshard(unit)
        wait_for_unshard(unit)
        grad = _whole_grad(unit) if options.with_grads else None
        whole = UnitParams(unit, unit.unsharded.data, grad)
        if not shown:
            hooks.engine.parameters.reshard(unit)  # it was only needed to take part
        elif options.offload_to_cpu:
            # Copied even from one place in the host's memory to another: the gathered one is freed
            # now, and whoever reads a view of freed memory on a CPU is killed.
            whole.flat = torch.empty_like(whole.flat, device=HOST).copy_(whole.flat)
            whole.grad = None if grad is None else grad.to(HOST)
            hooks.engine.parameters.reshard(unit)
    return whole


def _whole_grad(unit: Unit) -> Tensor | None:
    """The gathered gradient of a unit, ``[n * ranks]``, in the dtype of its shard.

    Raises:
        RuntimeError: some of it has not been reduced.
    """
    if unit.unreduced_grad is not None:
        raise RuntimeError(
            f"unit {unit.label} has gradients from no_sync() that have not been reduced yet. Run "
            f"the last backward outside of no_sync() before you look at them."
        )
    grad = unit.sharded_flat_param.grad
    if grad is None or not unit.numel:
        return None
    chunk = torch.zeros(unit.padded_shard.shape, dtype=unit.padded_shard.dtype, device=unit.device)
    chunk[: grad.numel()] = grad
    if unit.shard_group is None:
        return chunk
    whole = chunk.new_empty(unit.padded_numel)
    all_gather(whole, chunk, unit.shard_group, unit.tag, unit.label, Kind.GRADIENT)()
    return whole


def _is_first(unit: Unit) -> bool:
    return all(g is None or g.rank() == 0 for g in (unit.shard_group, unit.replicate_group))

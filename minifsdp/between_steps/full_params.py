"""Unsharded parameters between steps: read them, and change them.

Outside of its forward and backward a unit has a flat shard without names. To read
``layer.weight``, or to set it, all ranks gather it together::

    with FSDP.summon_full_params(model):
        print(model.layer.weight)       # the unsharded parameter, on every rank
        model.layer.weight.zero_()      # when the block ends, the shards have this change

Inside of the block, parameters and buffers have the dtypes in which they are stored, and not those
of the computation.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minifsdp.between_steps.idle import Readers, show_divided_params
from minifsdp.between_steps.state_dict_calls import StateDictCalls
from minifsdp.between_steps.unit_params import SummonedParams
from minifsdp.checks.rank_agreement import Moment, RankAgreement
from minifsdp.checks.same_model import remember_values
from minifsdp.chunks.unit_dtensors import Form, UnitDTensors
from minifsdp.comm.collectives import gather
from minifsdp.comm.message_tags import Kind
from minifsdp.core.unit_state import Purpose
from minifsdp.core.unshard import wait_for_unshard
from minifsdp.featured_hooks import FeaturedHooks
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.offload import HOST
from minifsdp.precision import Precision
from minifsdp.support.fingerprint import fingerprint

SUMMON = "summon_full_params"  # a reason to stay


@dataclass(frozen=True)
class Options:
    """The arguments of :meth:`FullyShardedDataParallel.summon_full_params`, and one more."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    form: Form | None = None  # of as_dtensors(): DTensors, in place of full parameters


@contextmanager
def summon(units: Mapping[FeaturedUnit, FeaturedHooks], options: Options) -> Iterator[None]:
    """:func:`full_params` of units that may have several roots.

    Args:
        units: each with the hooks of its root.
    """
    by_root: dict[FeaturedHooks, list[FeaturedUnit]] = {}
    for unit, hooks in units.items():
        by_root.setdefault(hooks, []).append(unit)
    with ExitStack() as stack:
        for hooks, below in by_root.items():
            stack.enter_context(full_params(hooks, below, options))
        yield


@contextmanager
def full_params(
    hooks: FeaturedHooks, units: list[FeaturedUnit], options: Options
) -> Iterator[None]:
    """In the block, the modules of ``units`` have unsharded parameters under their original names.

    Every rank has to take part. If units are unsharded already by a block around this one, they
    stay so when this one ends.

    Args:
        hooks: of the root of all ``units``.

    Raises:
        RuntimeError: a forward or backward is in progress, or a block that shows the parameters in
            another form; with ``with_grads``, a gradient is not reduced yet.
        ValueError: ``writeback`` with ``rank0_only``: the other ranks would have nothing to write;
            or, with ``writeback``, a parameter was removed or its shape changed.
    """
    engine = hooks.engine
    agreement = engine.layer(RankAgreement)
    engine.layer(StateDictCalls).close_aborted()
    if not hooks.idle:
        raise RuntimeError(
            "summon_full_params was called in a forward or in a backward of this model (as "
            "state_dict, load_state_dict and apply do, too). Call it between steps."
        )
    if options.writeback and options.rank0_only:
        raise ValueError(
            "summon_full_params(rank0_only=True) needs writeback=False: each rank writes back its "
            "own shard, and only rank 0 would have the parameters."
        )
    if not hooks.summoned:
        hooks.backward.forget_failed()
        engine.start(Purpose.LOOK)
    if agreement.sharded:  # otherwise each rank has all parameters, and need not communicate
        agreement.at(Moment.SUMMON_FULL_PARAMS_OF, engine.root)
    for unit in units:
        if hooks.summoned.get(unit, options.form) is not options.form:
            raise RuntimeError(
                f"the parameters of unit {unit.label} are out already, in another form: as full "
                f"parameters (summon_full_params) or as DTensors (as_dtensors, or a state dict of "
                f"type SHARDED_STATE_DICT). Leave that block first."
            )
    units = [unit for unit in units if unit not in hooks.summoned]
    # For the other units a backward may follow that needs placeholders; see show_divided_params.
    shown_before = [unit for unit in units if not unit.has_placeholders]
    shown = not options.rank0_only or all(is_first(unit) for unit in units)
    hooks.summoned.update(dict.fromkeys(units, options.form))
    summoned: list[SummonedParams | UnitDTensors] = []
    try:
        for unit in units:
            params = _summon(hooks, unit, options, shown)
            if shown:
                params.register()
                summoned.append(params)
        engine.layer(Readers).wait()  # the block may change parameters: they are written back
        yield
        if options.writeback:
            for params in summoned:  # check all before any is written
                params.check_shapes()
            for params in summoned:
                if params.write_back() and isinstance(params, SummonedParams):
                    remember_values(params.unit, fingerprint([params.flat]))
                    agreement.compare_values_again()
    finally:
        for params in summoned:
            params.unregister()
        for unit in units:
            hooks.summoned.pop(unit, None)
            unit.reasons.discard(SUMMON)
            engine.parameters.reshard(unit)  # let_go() would warn of what the program has kept
        show_divided_params(shown_before)
        if not hooks.summoned:
            engine.layer(Precision).restore()  # a backward may follow, of a forward before


def _summon(
    hooks: FeaturedHooks, unit: FeaturedUnit, options: Options, shown: bool
) -> SummonedParams | UnitDTensors:
    # Only while it gathers: in the block the caller decides whether gradients are recorded.
    with torch.no_grad():
        if options.form is not None:
            return UnitDTensors(unit, options.form)
        hooks.engine.parameters.unshard(unit, SUMMON)
        wait_for_unshard(unit)
        grad = _unsharded_grad(unit) if options.with_grads else None
        params = SummonedParams(unit, unit.unsharded.data, grad)
        if not shown:
            # This rank only had to take part in the all-gather.
            unit.let_go(SUMMON)
        elif options.offload_to_cpu:
            # A copy also if the parameters are in the host's memory already: the unsharded flat
            # parameter is freed now, and to read a view of freed memory would end the process.
            params.flat = torch.empty_like(params.flat, device=HOST).copy_(params.flat)
            params.grad = None if grad is None else grad.to(HOST)
            unit.let_go(SUMMON)
    return params


def _unsharded_grad(unit: FeaturedUnit) -> Tensor | None:
    """All-gather the gradient of a unit.

    Returns:
        ``[padded_numel]``, in the dtype of the shard and on the unit's device; in rows, without
        what is frozen. None if there is no gradient.

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
    numel, blocks = unit.layout.trained_numel, unit.layout.trained_blocks
    size = numel // unit.shard_world_size
    padded = torch.zeros(size, dtype=unit.padded_shard.dtype, device=unit.device)
    padded[: grad.numel()] = grad
    if unit.shard_group is None:
        return padded
    unsharded = padded.new_empty(numel)
    gather(unsharded, padded, unit.shard_group, unit.tag, unit.label, Kind.GRADIENT, blocks)
    return unsharded


def is_first(unit: FeaturedUnit) -> bool:
    """Whether this is the first of the ranks that share a unit."""
    return all(g is None or g.rank() == 0 for g in (unit.shard_group, unit.replicate_group))

"""What a program does to sharded flat parameters between two steps: it moves, casts or freezes
them, or assigns new values to their ``.data``.

torch does not report it. So at the start of each step the engine looks at every unit, and follows::

    module.to(device), .double()       padded_shard and unsharded flat parameters anew
    param.data = tensor                the same, with these values; refused in rows
    requires_grad_(False)              another unsharded flat parameter (FeaturedUnit.compute_in)

A step of an optimizer is known by a higher version of the shard, which not every kernel of torch
counts (:func:`watch_steps`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from minifsdp.comm.groups import carries
from minifsdp.comm.message_tags import exists
from minifsdp.core.layers import Layer
from minifsdp.core.unit_state import Purpose
from minifsdp.core.views import FLAT_PARAM
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.offload import HOST, has_memory, host_copy
from minifsdp.strategies import choose_strategies, source_of
from minifsdp.support.divided_param import (
    check_assigned,
    divide_again,
    set_owner,
    unit_of_param,
    was_changed,
)
from minifsdp.support.param_views import replaced


class ShardChanges(Layer):
    """Takes over, at each start, what a program has done to shards."""

    def __init__(self, engine: FeaturedEngine) -> None:
        self._engine = engine
        self._device: torch.device | None = None  # of the units, when they were last looked at

    def start(self, purpose: Purpose) -> None:
        """Raises ValueError or RuntimeError: see the functions that are called."""
        units = self._engine.units
        device = common_device(units)
        if device is not None and device != self._device:
            check_carried(units, device)
            self._device = device
            self.follow_to(device)
        for unit in units:
            mixed = unit.mixed
            follow_changes(unit)
            if unit.mixed is not mixed:  # its parameters were cast, and it is laid out anew
                unit.source = unit.own_source = source_of(unit)
                choose_strategies([unit], self._engine.streams)

    def follow_to(self, device: torch.device) -> None:
        """The units are on this device now: take its streams, and the strategies that suit it."""
        engine = self._engine
        if device != engine.streams.device:
            engine.compute_on(device)
            choose_strategies(engine.units, engine.streams)


def was_moved(unit: FeaturedUnit) -> bool:
    """Whether the shard has different memory from that which it was given."""
    if unit.mesh is not None:
        return was_changed(unit)
    shard, given = unit.sharded_flat_param, unit.padded_shard
    # Compared by address: module.to() and `param.data = ...` put new memory under it.
    moved = shard.numel() > 0 and shard.data_ptr() != given.data_ptr()
    return moved or shard.device != given.device or shard.dtype != given.dtype


def follow_changes(unit: FeaturedUnit) -> None:
    """Take over what was moved, cast, replaced or given other values. The unit is sharded.

    Raises:
        ValueError: the shard has another size now.
        RuntimeError: it was moved away from the host, where it should stay, or replaced; or, in
            rows, a program has assigned to its ``data``.
    """
    adopt(unit)  # it may have been moved through its module, not through the wrapper
    if unit.offload_from is not None:
        check_on_host(unit)
    if unit.mesh is not None:
        check_assigned(unit)
        if was_changed(unit):
            divide_again(unit)
        return
    shard = unit.sharded_flat_param
    if shard.numel() != unit.shard_numel:
        raise ValueError(
            f"the flat parameter of unit {unit.label} has {shard.numel()} elements; this "
            f"rank's chunk has {unit.shard_numel}. Assign a tensor of that size to its .data."
        )
    if was_moved(unit):
        with torch.inference_mode(False):  # this memory outlives the mode that a forward may run in
            padded = shard.data.new_zeros(unit.padded_shard.numel())
            unit.padded_shard = host_copy(padded, unit.offload_from)
            unit.padded_shard[: unit.shard_numel] = shard.data
            shard.data = unit.padded_shard[: unit.shard_numel]
            unit.unsharded_by_dtype.forget()


def check_on_host(unit: FeaturedUnit) -> None:
    """Raises RuntimeError: the shard of a unit with offload was moved away from the host."""
    shard = unit.optimized_params[0]
    moved = shard.device != HOST
    if moved and (has_memory(shard) or has_memory(unit.padded_shard)):  # else it has no values yet
        raise RuntimeError(
            f"the parameters of unit {unit.label} were moved to {shard.device}, but with "
            f"CPUOffload they live on the CPU and are uploaded when they are needed. Do not "
            f"move the model after wrapping; it computes on {unit.offload_from} by itself."
        )


def common_device(units: Sequence[FeaturedUnit]) -> torch.device | None:
    """The device that all units with parameters are on; None if there is no such unit. The
    others have nothing that ``module.to()`` moves. They are put there because of their inputs.

    Raises:
        ValueError: there are several devices.
    """
    # Of rows this is where the DTensors are: their flat parameter follows in follow_changes().
    places = [(unit.offload_from or unit.optimized_params[0].device, unit) for unit in units]
    by_device = {device: unit.label for device, unit in places if unit.numel}
    if len(by_device) > 1:
        found = "; ".join(f"{device}: {label}, ..." for device, label in by_device.items())
        raise ValueError(f"all units have to be on one device. Found {found}.")
    for device in by_device:
        for unit in units:
            if not unit.numel and unit.offload_from is not None:
                unit.offload_from = device  # its shard, which is empty, stays on the host
            elif not unit.numel and unit.device != device:
                moved = unit.sharded_flat_param.to(device)
                unit.replace_shard(nn.Parameter(moved, requires_grad=False))
        return device
    return None


def check_carried(units: Sequence[FeaturedUnit], device: torch.device) -> None:
    """Refuse units on a device whose tensors their groups do not carry, before anything is sent:
    torch would only say that there is no backend.

    Raises:
        RuntimeError: naming a parameter, its device, and what the group carries.
    """
    for unit in units if device.type != "meta" else ():  # on a virtual GPU (sim/) nothing is sent
        for group in (unit.shard_group, unit.replicate_group):
            if group is None or not unit.numel or not exists(group):  # destroyed: refused later
                continue
            if not carries(group, device):
                name = f"{unit.name}.{unit.param_infos[0].name}".removeprefix(".")
                carried = dist.get_backend_config(group)
                raise RuntimeError(
                    f"parameter {name!r} of unit {unit.label} is on {device}, and the process "
                    f"group of its ranks carries only {carried} (device:backend). Move the model "
                    f"there: with device_id= FullyShardedDataParallel does it while it wraps, with "
                    f"mesh= fully_shard does. Or use a group that carries what is on {device.type}"
                    f": init_process_group('gloo') for CPUs, 'nccl' for CUDA."
                )


def adopt(unit: FeaturedUnit) -> None:
    """Take over the parameter that ``module.to(...)`` has put in place of the flat parameter, or
    the DTensors that it has changed."""
    own: Any = unit.sharded_flat_param  # in rows a DividedParameter
    if unit.mesh is not None:
        set_owner(unit, own)
    found = unit.module._parameters.get(FLAT_PARAM)
    if found is None or found is own:
        return
    # torch moves values, or casts them. Different values were put there for one call only.
    moved = found.dtype != own.dtype or found.device != own.device or torch.equal(found, own)
    if type(found) is not nn.Parameter or not moved:
        raise replaced(unit, FLAT_PARAM, found)
    unit.module._parameters[FLAT_PARAM] = unit.replace_shard(found)


@cache
def watch_steps() -> None:
    """Count each step of every optimizer as a change of the units that it steps, until the process
    ends.

    torch's fused kernels count no version, nor do the foreach kernels for a DTensor. So without
    this a step between a forward and its backward would go unnoticed, and the backward would
    compute with different parameters from the forward's.
    """
    register_optimizer_step_post_hook(_after_step)


@never_compile_inside
def _after_step(optimizer: Optimizer, *_: object) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    stepped = (param for param in params if param.grad is not None)
    for unit in {unit_of_param(param) for param in stepped} - {None}:
        increment_version(unit.sharded_flat_param)

"""What the arguments of one wrapper mean for its unit."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from minifsdp.api import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.comm.groups import Placement, place
from minifsdp.streams import BACKENDS


@dataclass(frozen=True)
class Settings:
    """How one unit is to be built."""

    placement: Placement
    precision: MixedPrecision
    offload: bool
    device: torch.device | None  # where the user wants it, if he has said so
    init_fn: Callable[[nn.Module], None] | None  # for what is on the meta device
    synchronize: bool  # take rank 0's values


def as_settings(
    process_group: Any,
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: CPUOffload | None,
    mixed_precision: MixedPrecision | None,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | str | torch.device | None,
    sync_module_states: bool,
    device_mesh: Any,
) -> Settings:
    """These arguments, as :class:`FullyShardedDataParallel` has them.

    Raises:
        ValueError, TypeError, RuntimeError: as it does.
    """
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    if cpu_offload is not None and not isinstance(cpu_offload, CPUOffload):
        raise TypeError(_wrong_type("cpu_offload", CPUOffload, cpu_offload))
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn is a function of a module, not {param_init_fn!r}")
    return Settings(
        placement=place(strategy, process_group, device_mesh),
        precision=as_precision(mixed_precision),
        offload=cpu_offload is not None and cpu_offload.offload_params,
        device=as_device(device_id),
        init_fn=param_init_fn,
        synchronize=sync_module_states,
    )


def as_precision(mixed_precision: object) -> MixedPrecision:
    """What that argument means: without it, everything is done in the parameters' dtype.

    Raises:
        TypeError: it is something else, such as FSDP2's record.
    """
    precision = MixedPrecision() if mixed_precision is None else mixed_precision
    if not isinstance(precision, MixedPrecision):
        raise TypeError(_wrong_type("mixed_precision", MixedPrecision, precision))
    if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":  # torch reads it here, too
        precision = replace(precision, full_precision_in_eval=True)
    return precision


def _wrong_type(argument: str, expected: type, found: object) -> str:
    cls = type(found)
    return (
        f"{argument} is a minifsdp.{expected.__name__}, not {cls.__module__}.{cls.__qualname__}: "
        f"{found!r}"
    )


def as_device(device_id: int | str | torch.device | None) -> torch.device | None:
    """What the argument ``device_id`` means: a number is that GPU, "cuda" the current one.

    Raises:
        ValueError: there is no such device, or none that minifsdp runs on.
    """
    if device_id is None:
        return None
    device = torch.device(f"cuda:{device_id}" if isinstance(device_id, int) else device_id)
    if device.type not in BACKENDS:
        raise ValueError(
            f"device_id={device_id!r}: minifsdp runs on {' and '.join(sorted(BACKENDS))}"
        )
    if device.type != "cuda":
        return torch.device(device.type)  # "cpu:0" is the CPU, but not equal to it
    gpus = torch.cuda.device_count()
    if (device.index or 0) >= gpus:
        raise ValueError(
            f"device_id={device_id!r} means a GPU that is not there: torch sees {gpus} of them on "
            f"this machine. To compute on the CPU, use device_id='cpu' or leave it out."
        )
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

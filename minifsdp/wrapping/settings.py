"""The arguments of one ``FullyShardedDataParallel`` that decide how its unit is built.

They are listed twice: in the signature that users read, and here. A wrapper makes a record of them.
The record checks them all before anything is changed, and says what they mean::

    FSDP(module, device_id=1, ...)   ->   Settings(device_id=1, ...)   .device    cuda:1
                                                                       .placement who shares it
    auto_wrap_policy makes inner     <-   {**settings.arguments, **what the policy says of it}
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from minifsdp.api import CPUOffload, MixedPrecision
from minifsdp.comm.groups import place
from minifsdp.core.api import ShardingStrategy
from minifsdp.core.streams import BACKENDS
from minifsdp.wrapping.torch_names import from_torch


@dataclass
class Settings:
    """These arguments, as :class:`FullyShardedDataParallel` takes them, and what they mean.

    Attributes:
        placement: the groups to shard and to replicate over.
        precision: the dtypes to compute and to reduce in.
        offload: whether shards live on the host.
        device: where the user wants the unit; None if that was not said.

    Raises:
        ValueError, TypeError, RuntimeError: as :class:`FullyShardedDataParallel` does.
    """

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    device_mesh: Any = None
    use_orig_params: bool = False

    def __post_init__(self) -> None:
        offload = _checked("cpu_offload", from_torch(self.cpu_offload), CPUOffload)
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise TypeError(f"param_init_fn is a function of a module, not {self.param_init_fn!r}")
        strategy = from_torch(self.sharding_strategy) or ShardingStrategy.FULL_SHARD
        self.placement = place(strategy, self.process_group, self.device_mesh)
        precision = _checked("mixed_precision", from_torch(self.mixed_precision), MixedPrecision)
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":  # torch reads it here, too
            precision = replace(precision, full_precision_in_eval=True)
        self.precision: MixedPrecision = precision
        self.offload: bool = offload.offload_params
        self.device = as_device(self.device_id)

    @property
    def arguments(self) -> dict[str, Any]:
        """As they were given, by name, for the wrappers that an auto_wrap_policy makes inside."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _checked(argument: str, found: object, expected: type) -> Any:
    """``found``, if it is an ``expected``; for None one with all defaults."""
    found = expected() if found is None else found
    if not isinstance(found, expected):
        cls = type(found)
        raise TypeError(
            f"{argument} is a minifsdp.{expected.__name__}, not "
            f"{cls.__module__}.{cls.__qualname__}: {found!r}"
        )
    return found


def as_device(device_id: int | str | torch.device | None) -> torch.device | None:
    """The device that the argument ``device_id`` means: a number is that GPU, "cuda" the current
    one. None if it was left out.

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
        return torch.device(device.type)  # "cpu:0" is the CPU, but is not equal to "cpu"
    gpus = torch.cuda.device_count()
    if (device.index or 0) >= gpus:
        raise ValueError(
            f"device_id={device_id!r} means a GPU that is not there: torch sees {gpus} of them on "
            f"this machine. To compute on the CPU, use device_id='cpu' or leave it out."
        )
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())

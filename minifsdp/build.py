"""From a module to a unit.

The steps, in the order that keeps memory low: parameters that are on the meta device come to be,
all are moved to where they belong and made the same on all ranks, then they are laid end to end,
this rank's chunk is cut out, and the originals are let go. Whoever still holds one of those holds
the memory of a whole model; if it is an optimizer, it would also step tensors that nobody uses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.api import MixedPrecision
from minifsdp.borders import (
    check_optimizers,
    check_sharing,
    collect,
    mark_taken,
    own_modules,
    select,
    wrap_inside,
)
from minifsdp.buffers import Buffers
from minifsdp.groups import Placement
from minifsdp.materialize import materialize, move, synchronize
from minifsdp.precision import ISLAND
from minifsdp.streams import BACKENDS
from minifsdp.unit import Unit
from minifsdp.wrap import ModuleWrapPolicy, Policy

# A tag for each unit of a group, the same on all its ranks, since they make its units in the same
# order. By group: a rank may be in several, and make units that others have no part in. The numbers
# are far from the small ones that users give to messages of their own.
_tags: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(0x4D46_0000))


@dataclass(frozen=True)
class Settings:
    """How one unit is to be built."""

    placement: Placement
    precision: MixedPrecision
    offload: bool
    device: torch.device | None  # where the user wants it, if he has said so
    init_fn: Callable[[nn.Module], None] | None  # for what is on the meta device
    synchronize: bool  # take rank 0's values


def wrap_below(
    module: nn.Module, policy: Policy, precision: MixedPrecision, wrapper: Callable[..., nn.Module]
) -> None:
    """Wrap what ``policy`` wants below ``module``; and, to keep them in full precision, the modules
    that mixed precision leaves out.

    Args:
        wrapper: called with a module, and the settings that it has of its own.
    """
    borders = select(module, policy)
    if precision.param_dtype is not None:
        for island in select(module, ModuleWrapPolicy(precision._module_classes_to_ignore)):
            borders[island] = {"mixed_precision": ISLAND, **borders.get(island, {})}
    check_sharing(module, borders)
    # Inner ones first: what is wrapped around them must find their parameters taken.
    inner_first = sorted(borders, key=lambda border: sum(1 for _ in border.modules()))
    wrap_inside(module, {border: borders[border] for border in inner_first}, wrapper)


def build_unit(module: nn.Module, settings: Settings) -> Unit:
    """Make a unit of the parameters below ``module`` that no unit inside has taken.

    Raises:
        ValueError: they cannot share a unit, or one of them is another unit's too, or they are on
            the meta device and cannot be given values.
        RuntimeError: an optimizer holds them.
    """
    modules = own_modules(module)
    slots = collect(module)  # first: it may refuse
    originals = {
        f"{name}.{attribute}" if name else attribute: ref(param)
        for name, its_module in modules.items()
        for attribute, param in its_module._parameters.items()
        if param is not None
    }
    groups = [g for g in (settings.placement.shard_group, settings.placement.replicate_group) if g]
    device = settings.device
    materialize(modules, device or default_device(groups[0]), settings.init_fn)
    if device is not None:
        move(modules, device)
    if settings.synchronize:
        synchronize(modules, groups[::-1])
    params = [slot.parameter for slot in slots]
    if settings.offload and device is None:
        on_device = {p.device for p in params if p.device.type != "cpu"}
        device = on_device.pop() if on_device else default_device(groups[0])
    unit = Unit(
        slots,
        params,
        Buffers(list(modules.values()), settings.precision.buffer_dtype),
        settings.placement,
        settings.precision,
        device if settings.offload else None,
        tag=next(_tags[groups[0].group_name]),
    )
    params.clear()  # the last references here; who else has one should not
    mark_taken(unit, originals)
    check_optimizers(originals)
    return unit


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's ranks compute, if nobody says: where its collectives run."""
    backends = dist.get_backend_config(group)  # "cuda:nccl", or "cpu:gloo,cuda:nccl"
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    if "fake" in backends:
        return torch.get_default_device()  # on a virtual GPU (sim/) that is its memory
    return torch.device("cpu")


def as_precision(mixed_precision: object) -> MixedPrecision:
    """What that argument means: without it, everything is done in the parameters' dtype.

    Raises:
        TypeError: it is something else, such as torch's record of the same name.
    """
    if mixed_precision is None:
        return MixedPrecision()
    if not isinstance(mixed_precision, MixedPrecision):
        found = type(mixed_precision)
        raise TypeError(
            f"mixed_precision is a minifsdp.MixedPrecision, not {found.__module__}."
            f"{found.__qualname__}: {mixed_precision!r}"
        )
    return mixed_precision


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

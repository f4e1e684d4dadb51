"""From a module to a unit.

The steps, in the order that keeps memory low: parameters that are on the meta device come to be,
all are moved to where they belong and made the same on all ranks, then they are laid end to end,
this rank's chunk is cut out, and the originals are let go. Whoever still holds one of those holds
the memory of a whole model; if it is an optimizer, it would also step tensors that nobody uses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.api import MixedPrecision
from minifsdp.checks.members import check_free, join
from minifsdp.checks.optimizers import watch_optimizers
from minifsdp.checks.rank_circles import answering
from minifsdp.checks.same_model import remember_values
from minifsdp.limiter import make_limiter
from minifsdp.precision import ISLAND
from minifsdp.support.buffers import Buffers
from minifsdp.support.fingerprint import fingerprint
from minifsdp.support.flat_parameter import watch_for_losses
from minifsdp.support.param_views import use_sharded_views
from minifsdp.unit import Unit
from minifsdp.wrapping.auto_wrap import check_sharing, check_wrappable, collect, select, wrap_inside
from minifsdp.wrapping.materialize import materialize, move, synchronize
from minifsdp.wrapping.module_tree import own_modules
from minifsdp.wrapping.orig_params import check_hooks, check_optimizers, mark_taken, originals
from minifsdp.wrapping.policies import ModuleWrapPolicy, Policy
from minifsdp.wrapping.settings import Settings

# A tag for each unit of a group, the same on all its ranks, since they make its units in the same
# order. By group: a rank may be in several, and make units that others have no part in. The numbers
# are far from the small ones that users give to messages of their own.
_tags: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(0x4D46_0000))


def wrap_below(
    module: nn.Module, policy: Policy, precision: MixedPrecision, wrapper: Callable[..., nn.Module]
) -> None:
    """Wrap what ``policy`` wants below ``module``; and, to keep them in full precision, the modules
    that mixed precision leaves out.

    Args:
        wrapper: called with a module, and the settings that it has of its own.
    """
    _check_outsiders(dict(module.named_modules()))  # before the first of them is wrapped
    borders = select(module, policy)
    check_wrappable(module, borders=borders.keys())
    if precision.param_dtype is not None:
        for island in select(module, ModuleWrapPolicy(precision._module_classes_to_ignore)):
            borders[island] = {"mixed_precision": ISLAND, **borders.get(island, {})}
    check_sharing(module, borders)
    for own in borders.values():
        make_limiter(own.get("limit_all_gathers", True))  # refused before the first is wrapped
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
    check_free(modules)  # first: these may refuse
    _check_outsiders(modules)
    param_infos = collect(module)
    before = originals(modules)
    groups = [g for g in (settings.placement.shard_group, settings.placement.replicate_group) if g]
    device = settings.device
    materialize(modules, device or default_device(groups[0]), settings.init_fn)
    modules = own_modules(module)  # once more: a param_init_fn may put new ones there
    param_infos = collect(module)
    if device is not None:
        move(modules, device)
    if settings.synchronize:
        synchronize(modules, groups[::-1])
    params = [info.parameter for info in param_infos]
    if settings.offload and device is None:
        on_device = {p.device for p in params if p.device.type != "cpu"}
        device = on_device.pop() if on_device else default_device(groups[0])
    whole = fingerprint(params) if answering(groups) else None
    unit = Unit(
        module,
        param_infos,
        params,
        Buffers(list(modules.values()), settings.precision.buffer_dtype),
        settings.placement,
        settings.precision,
        device if settings.offload else None,
        tag=next(_tags[groups[0].group_name]),
    )
    use_sharded_views(unit)
    remember_values(unit, whole)
    params.clear()  # the last references here; who else has one should not
    mark_taken(unit, before)
    join(unit, modules)
    unit.watched = watch_for_losses(unit.sharded_flat_param)
    watch_optimizers()
    return unit


def _check_outsiders(modules: dict[str, nn.Module]) -> None:
    check_optimizers(modules)
    check_hooks(modules)


def default_device(group: dist.ProcessGroup) -> torch.device:
    """Where a group's ranks compute, if nobody says: where its collectives run."""
    backends = dist.get_backend_config(group)  # "cuda:nccl", or "cpu:gloo,cuda:nccl"
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    if "fake" in backends:
        return torch.get_default_device()  # on a virtual GPU (sim/) that is its memory
    return torch.device("cpu")

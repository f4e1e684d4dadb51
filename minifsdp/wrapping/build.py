"""From a module to a unit.

The order of the steps keeps the memory low: parameters on the meta device get memory, all are moved
to where they belong and made the same on all ranks, then they are flattened and this rank's shard
is cut out, and the original parameters are let go::

    refuse -> materialize -> move -> synchronize -> flatten and shard -> placeholders

Whatever can be refused is refused first, while the model is still as it was. Whatever holds an
original parameter at the end keeps its memory. An optimizer would also step tensors that no layer
uses, so it is refused or, in rows, gets the DTensors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from minifsdp.between_steps.idle import show_divided_params
from minifsdp.checks.held_values import check_memory
from minifsdp.checks.members import check_free, join
from minifsdp.checks.same_model import remember_values
from minifsdp.chunks.optimizers import watch_optimizers
from minifsdp.chunks.param_attributes import warn_of_lost_attributes
from minifsdp.comm.consensus import groups_with_peers
from minifsdp.comm.groups import mesh_of
from minifsdp.core.auto_wrap import wrap_inside
from minifsdp.core.views import hide_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.offload import has_memory
from minifsdp.precision import FULL_PRECISION
from minifsdp.rows import ALIGNED
from minifsdp.strategies import set_strategies
from minifsdp.support.buffers import Buffers
from minifsdp.support.fingerprint import fingerprint
from minifsdp.support.shard_changes import watch_steps
from minifsdp.wrapping.auto_wrap import (
    Policy,
    check_sharing,
    check_wrappable,
    make_param_infos,
    select,
)
from minifsdp.wrapping.materialize import materialize, move, synchronize
from minifsdp.wrapping.module_tree import Modules, own_modules
from minifsdp.wrapping.orig_params import (
    Held,
    check_hooks,
    check_optimizers,
    hand_over,
    orig_params,
    set_unit,
)
from minifsdp.wrapping.policies import ModuleWrapPolicy
from minifsdp.wrapping.root_settings import make_limiter
from minifsdp.wrapping.settings import Settings

# A tag for each unit of a group. It is the same on all ranks of the group, since they make its
# units in the same order. By group: a rank may be in several, and make units that others have no
# part in. The numbers are far from the small ones that users give to messages of their own.
_tags: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(0x4D46_0000))


def wrap_below(
    module: nn.Module, policy: Policy, settings: Settings, wrapper: Callable[..., nn.Module]
) -> None:
    """Wrap the modules below ``module`` that ``policy`` wants. With mixed precision, also wrap
    modules of ``_module_classes_to_ignore``, to keep them in full precision.

    Args:
        settings: of ``module``; inner wrappers get the same, unless the policy gives others.
        wrapper: called with a module, and with arguments by name.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`build_unit` does, and the policies.
    """
    # Before the first of them is wrapped.
    _check_params_unused(dict(module.named_modules()), settings.use_orig_params)
    to_wrap = select(module, policy)
    check_wrappable(module, to_wrap=to_wrap.keys())
    precision = settings.precision
    if precision.param_dtype is not None:
        for ignored in select(module, ModuleWrapPolicy(precision._module_classes_to_ignore)):
            to_wrap[ignored] = {"mixed_precision": FULL_PRECISION, **to_wrap.get(ignored, {})}
    check_sharing(module, to_wrap.keys())
    for own in to_wrap.values():
        make_limiter(own.get("limit_all_gathers", True))  # refused before the first is wrapped
    # Inner ones first: an outer unit is made of the parameters that no unit inside has.
    inner_first = sorted(to_wrap, key=lambda inner: sum(1 for _ in inner.modules()))
    arguments = {inner: {**settings.arguments, **to_wrap[inner]} for inner in inner_first}
    wrap_inside(module, arguments, wrapper)


@torch.inference_mode(False)  # what is made here outlives the mode that a program may be in
def build_unit(
    module: nn.Module,
    settings: Settings,
    stays_on_meta: bool = False,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> FeaturedUnit:
    """Make a unit of the parameters below ``module`` that no unit inside has.

    Args:
        stays_on_meta: what is on the meta device gets no memory here. The program gives it some
            later (``module.to_empty()``), and then it is this rank's part only.
        dims: of parameters that are divided along another dimension than their first, by name.

    Raises:
        ValueError: the parameters cannot share a unit, or one of them is in another unit too, or
            they are on the meta device and cannot be given values.
        RuntimeError: an optimizer holds one of them, and cannot get a DTensor for it.
    """
    modules = own_modules(module)
    # What may be refused comes first, while nothing has been changed.
    check_free(modules)
    held = _check_params_unused(modules, settings.use_orig_params)
    given = {info.name: info.attributes for info in make_param_infos(module)}
    originals = orig_params(modules)
    groups = [g for g in (settings.placement.shard_group, settings.placement.replicate_group) if g]
    device = settings.device
    if not stays_on_meta:
        materialize(modules, device or default_device(groups[0]), settings.param_init_fn)
    modules = own_modules(module)  # once more: a param_init_fn may put new ones there
    param_infos = make_param_infos(module)
    if not settings.use_orig_params:
        # GPUs read a matrix faster that begins at a multiple of 16 bytes. (rows.py orders its own.)
        param_infos.sort(key=lambda info: info.shape.numel() % ALIGNED > 0)
    for info in param_infos:  # what gets memory in place of the meta device is a new parameter
        info.attributes = {**given.get(info.name, {}), **info.attributes}
        info.dim = dims.get(info.name, 0)
    if device is not None:
        move(modules, device)
    if settings.sync_module_states:
        synchronize(modules, groups[::-1])
    params = [info.parameter for info in param_infos]
    if settings.offload and device is None:
        on_device = {p.device for p in params if p.device.type != "cpu" and has_memory(p)}
        device = on_device.pop() if on_device else default_device(groups[0])
    whole = fingerprint(params) if groups_with_peers(groups) else None
    params.clear()  # from here on only the modules refer to them, and the unit lets them go
    buffers = Buffers(list(modules.values()), settings.precision.buffer_dtype)
    offload_from = device if settings.offload else None
    tag = next(_tags[groups[0].group_name])
    mesh = None
    if settings.use_orig_params:  # the given mesh, since a program may compare it with a DTensor's
        its_groups = settings.placement, default_device(groups[0]).type
        mesh = settings.device_mesh or mesh_of(*its_groups)
    unit = FeaturedUnit(
        module, param_infos, buffers, settings.placement, settings.precision, offload_from, tag,
        mesh,
    )  # fmt: skip
    if not param_infos and not settings.offload:
        # An empty unit is on the device that its group carries tensors from: if no unit has any
        # parameters, ranks compare steps from there, and with NCCL that cannot be the CPU.
        empty = unit.sharded_flat_param.detach().to(device or default_device(groups[0]))
        unit.replace_shard(nn.Parameter(empty, requires_grad=False))
    set_strategies(unit)
    if mesh is None:
        warn_of_lost_attributes(param_infos)
    hide_views(unit)
    show_divided_params([unit])
    remember_values(unit, whole)
    hand_over(held, unit)
    set_unit(originals, unit)
    join(unit, modules)
    watch_optimizers()
    watch_steps()
    return unit


def _check_params_unused(modules: Modules, in_rows: bool) -> list[Held]:
    """Refuse parameters that an optimizer holds, that have hooks, or that share memory. In rows an
    optimizer may get DTensors for them. Then this returns where it holds them."""
    check_hooks(modules)
    check_memory(modules)
    return check_optimizers(modules, in_rows)


def default_device(group: dist.ProcessGroup) -> torch.device:
    """The device that a group's ranks compute on if the user names none: where its collectives
    run."""
    backends = dist.get_backend_config(group)  # "cuda:nccl", or "cpu:gloo,cuda:nccl"
    if "nccl" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    if "fake" in backends:
        return torch.get_default_device()  # on a virtual GPU (sim/) it stands for the GPU's memory
    return torch.device("cpu")

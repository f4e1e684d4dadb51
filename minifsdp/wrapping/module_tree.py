"""The tree of modules: which of them are wrappers, and what belongs to which wrapper.

A wrapper stands in the place of the module that it wraps, and has that module as a child. So names
get longer by one part at each wrapper, and users should never see that part::

    before wrapping    in the wrapper                   what users see
    0.weight           _fsdp_wrapped_module.0.weight    0.weight

Modules and parameters that a wrapper was told to ignore (ignored.py) belong to no unit. They are
marked in a table outside of the model: an attribute would be copied and saved together with a
module, and the copy would be ignored, too.
"""

from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.divided_param import is_optimized
from minifsdp.support.tensor_attribute import TensorAttribute

WRAPPER_PREFIX = "_fsdp_wrapped_module."  # torch's name, which checkpoints of torch's FSDP have too

Modules = dict[str, nn.Module]
"""The modules of one unit, by their names below the unit's module, whose own name is ''."""


def clean(name: str) -> str:
    """A fully qualified name as it was before wrapping. A wrapped module has its wrapper's."""
    return f"{name}.".replace(WRAPPER_PREFIX, "")[:-1]


_ignored: Any = WeakIdKeyDictionary()  # a module or a parameter -> the module that was wrapped


def ignore(item: nn.Module | nn.Parameter, wrapped: nn.Module | None) -> None:
    """Mark a module or a parameter as ignored by the wrapper of ``wrapped``; None: not any more."""
    if wrapped is None:
        _ignored.pop(item, None)
    else:
        _ignored[item] = ref(wrapped)


def ignored_by(item: nn.Module | Tensor | None) -> nn.Module | None:
    """The module whose wrapper ignores ``item``; None if none does, or if that module is gone."""
    found = None if item is None else _ignored.get(item)
    return None if found is None else found()


def is_ignored(item: nn.Module | Tensor | None) -> bool:
    """Whether a module or a parameter is in no unit because a wrapper was told to ignore it."""
    return ignored_by(item) is not None


def ignored_params(root: nn.Module) -> list[nn.Parameter]:
    """The parameters at and below ``root`` that are ignored, each once; also those that were put
    into an ignored module later."""
    found: dict[nn.Parameter, None] = {}
    for module in root.modules():
        below = own_modules(module).values() if is_ignored(module) else [module]
        for param in (param for inner in below for param in inner._parameters.values()):
            if param is not None and (is_ignored(module) or is_ignored(param)):
                found[param] = None
    return list(found)


def unit_of(module: nn.Module) -> FeaturedUnit | None:
    """The unit of a module that is a wrapper; None for other modules."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, FeaturedUnit) else None


def name_units(root: nn.Module) -> list[Any]:
    """Set the name of each unit at and below ``root``, and its ancestors.

    Returns:
        The wrappers at and below ``root``, outer ones first.
    """
    names = {m: clean(n) for n, m in root.named_modules() if unit_of(m) is not None}
    units: dict[Any, list[str]] = {}  # several names: those of a list of modules
    for wrapper, name in names.items():
        units.setdefault(wrapper._unit, []).append(name)
    for unit, places in units.items():
        unit.rename("" if unit.module is root else ", ".join(places))
        unit.ancestors = [
            outer
            for outer, around in units.items()
            if outer is not unit and any(_is_below(name, o) for o in around for name in places)
        ]
    return list(names)


def _is_below(name: str, outer: str) -> bool:
    return not outer or name.startswith(outer + ".")


def own_modules(module: nn.Module) -> Modules:
    """``module`` and the modules below it, without wrappers, without what is ignored, and without
    what is below those."""
    found: Modules = {}
    _own_modules(module, "", found, set())
    return found


def _own_modules(module: nn.Module, name: str, found: Modules, seen: set[nn.Module]) -> None:
    found[name] = module
    seen.add(module)
    for attribute, child in module._modules.items():
        if is_ignored(child):
            continue
        if child is not None and child not in seen and unit_of(child) is None:
            _own_modules(child, join_names(name, attribute), found, seen)


def own_params(modules: Modules, buffers: bool = False) -> dict[str, TensorAttribute]:
    """Where these modules have parameters, by name; a shared one is listed in each place. Sharded
    flat parameters are left out: their values belong to another unit. So are ignored ones.

    Args:
        buffers: list the buffers, too.
    """
    return {
        join_names(prefix, name): TensorAttribute(module, name)
        for prefix, module in modules.items()
        for tensors in (module._parameters, module._buffers if buffers else {})
        for name, tensor in tensors.items()
        if tensor is not None and not is_optimized(tensor) and not is_ignored(tensor)
    }


def join_names(prefix: str, name: str) -> str:
    """The fully qualified name of an attribute of the module that is called ``prefix``."""
    return f"{prefix}.{name}" if prefix else name

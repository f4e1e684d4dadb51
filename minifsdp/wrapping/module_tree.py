"""The tree of modules: which of them are wrappers, and what belongs to which wrapper.

A wrapper stands in the place of the module that it wraps, and has that module as a child. So names
get longer by one part at each wrapper, and users should never see that part::

    before wrapping    in the wrapper                   what users see
    0.weight           _fsdp_wrapped_module.0.weight    0.weight
"""

from typing import Any

from torch import nn

from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.support.tensor_attribute import TensorAttribute
from minifsdp.unit import Unit

WRAPPER_PREFIX = "_fsdp_wrapped_module."  # torch's name, which checkpoints of torch's FSDP have too

Modules = dict[str, nn.Module]
"""The modules of one unit, by their names below the unit's module, whose own name is ''."""


def clean(name: str) -> str:
    """A fully qualified name as it was before wrapping."""
    return name.replace(WRAPPER_PREFIX, "")


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that is a wrapper; None for other modules."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, Unit) else None


def name_units(root: nn.Module) -> list[Any]:
    """Set the name of each unit below ``root``, and its ancestors.

    Returns:
        The wrappers at and below ``root``, outer ones first.
    """
    names = {m: clean(n) for n, m in root.named_modules() if unit_of(m) is not None}
    units = {name: wrapper._unit for wrapper, name in names.items()}
    for name, unit in units.items():
        unit.name = name
        unit.ancestors = [
            outer
            for outer_name, outer in units.items()
            if outer is not unit and (not outer_name or name.startswith(outer_name + "."))
        ]
    return list(names)


def own_modules(module: nn.Module) -> Modules:
    """``module`` and the modules below it, without wrappers and what is below those."""
    found: Modules = {}
    _own_modules(module, "", found, set())
    return found


def _own_modules(module: nn.Module, name: str, found: Modules, seen: set[nn.Module]) -> None:
    found[name] = module
    seen.add(module)
    for attribute, child in module._modules.items():
        if child is not None and child not in seen and unit_of(child) is None:
            _own_modules(child, join_names(name, attribute), found, seen)


def own_params(modules: Modules, buffers: bool = False) -> dict[str, TensorAttribute]:
    """Where these modules have parameters, by name; a shared one is listed in each place. Sharded
    flat parameters are left out: their values belong to another unit.

    Args:
        buffers: list the buffers, too.
    """
    return {
        join_names(prefix, name): TensorAttribute(module, name)
        for prefix, module in modules.items()
        for tensors in (module._parameters, module._buffers if buffers else {})
        for name, tensor in tensors.items()
        if tensor is not None and not isinstance(tensor, FlatParameter)
    }


def join_names(prefix: str, name: str) -> str:
    """The fully qualified name of an attribute of the module that is called ``prefix``."""
    return f"{prefix}.{name}" if prefix else name

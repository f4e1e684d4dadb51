"""The tree of modules: which of them are wrappers, what belongs to which, and what it is called.

A wrapper stands in the place of the module that it wraps, and has it as a child. So names get one
part longer at each wrapper, and no user should ever see that part.
"""

from typing import Any

from torch import nn

from minifsdp.unit import Unit

WRAPPER_PREFIX = "_fsdp_wrapped_module."  # the name that torch gives it, in every state dict since

Modules = dict[str, nn.Module]
"""Those of one unit, by their name below its module, which itself has the name ''."""


def clean(name: str) -> str:
    """A fully qualified name as it was before wrapping."""
    return name.replace(WRAPPER_PREFIX, "")


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that is a wrapper, else None."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, Unit) else None


def name_units(root: nn.Module) -> list[Any]:
    """Give each unit its name below ``root``, and those around it. Returns the wrappers, outer ones
    first."""
    names = {m: clean(n) for n, m in root.named_modules() if unit_of(m) is not None}
    units = {name: wrapper._unit for wrapper, name in names.items()}
    for name, unit in units.items():
        unit.name = name
        unit.ancestors = [
            outer
            for its_name, outer in units.items()
            if outer is not unit and (not its_name or name.startswith(its_name + "."))
        ]
    return list(names)


def own_modules(module: nn.Module) -> Modules:
    """``module`` and what is below it, without wrapped modules and what is below those."""
    found: Modules = {}
    _own_modules(module, "", found, set())
    return found


def _own_modules(module: nn.Module, name: str, found: Modules, seen: set[nn.Module]) -> None:
    found[name] = module
    seen.add(module)
    for attribute, child in module._modules.items():
        if child is not None and child not in seen and unit_of(child) is None:
            _own_modules(child, f"{name}.{attribute}" if name else attribute, found, seen)

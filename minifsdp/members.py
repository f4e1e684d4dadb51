"""Which module is in which unit. Nobody may put another one in its place.

A unit has the parameters that its modules had when it was built. Those of a module that comes later
are in no unit: every rank would train them alone, and they would drift apart. A module that goes
would leave its part of the chunks behind. torch tells everybody who asks whenever a module is put
into another one, so a replaced part is refused at once, and no step has to look for it. What only
wraps a part, such as activation checkpointing or ``torch.compile``, is welcome.
"""

from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from minifsdp.tree import WRAPPER_PREFIX, Modules, clean, unit_of
from minifsdp.unit import Unit

WRAPPED = WRAPPER_PREFIX.rstrip(".")
_units: "WeakKeyDictionary[nn.Module, ref[Unit]]" = WeakKeyDictionary()


def check_free(modules: Modules) -> None:
    """Refuse to make a unit of modules whose parameters another one has.

    Raises:
        ValueError: naming a module and its unit.
    """
    for name, module in modules.items():
        if (unit := _unit_with(module)) is not None and _holds(module):
            raise ValueError(
                f"module {name or '<root>'!r} ({type(module).__name__}) is in unit {unit.label} of "
                f"a FullyShardedDataParallel already, which has sharded its parameters. Wrap inner "
                f"modules first, or let auto_wrap_policy do it."
            )


def join(unit: Unit, modules: Modules) -> None:
    """Write down that these are in ``unit``."""
    for module in modules.values():
        _units[module] = ref(unit)


def check_part(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse ``parent.name = child``, if that takes parameters out of a unit, or brings new ones.

    Raises:
        RuntimeError: naming the unit and the module.
    """
    unit = unit_of(parent) if WRAPPED in parent._modules else _unit_with(parent)
    if unit is None:
        return
    before, after = _holders(parent._modules.get(name)), _holders(child)
    if before.keys() == after.keys():
        return
    kind = type(parent if unit_of(parent) is None else parent._modules[WRAPPED]).__name__
    changed = {after.get(m, before.get(m)) for m in before.keys() ^ after.keys()}
    parts = ", ".join(sorted(repr(clean(f"{name}.{part}").strip(".")) for part in changed))
    raise RuntimeError(
        f"{name!r} of {kind} in unit {unit.label} cannot be replaced, added or removed after "
        f"wrapping. The unit was made of the parameters that there were; {parts} would be missing "
        f"in it, or left over. Change the model before you wrap it. To set values, use "
        f"FSDP.summon_full_params(model)."
    )


def _unit_with(module: nn.Module) -> Unit | None:
    unit = _units.get(module)
    return None if unit is None else unit()


def _holders(module: nn.Module | None) -> dict[nn.Module, str]:
    """The modules at and below ``module`` that have, or had before wrapping, parameters."""
    return {} if module is None else {m: n for n, m in module.named_modules() if _holds(m)}


def _holds(module: nn.Module) -> bool:
    unit = _unit_with(module)
    if unit is not None and any(module is m for slot in unit.slots for m, _ in slot.owners):
        return True
    params = module._parameters.values()
    return any(p is not None for p in params)


register_module_module_registration_hook(check_part)

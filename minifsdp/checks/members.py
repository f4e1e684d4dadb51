"""Which module is in which unit. Nobody may put another one in its place.

A unit has the parameters that its modules had when it was built. Those of a module that comes later
are in no unit: every rank would train them alone, and they would drift apart. A module that goes
would leave its part of the chunks behind. torch tells everybody who asks whenever a module or a
parameter is put into a module, so that is refused at once, and no step has to look for it. What
only wraps a part, such as activation checkpointing or ``torch.compile``, is welcome.

Between steps a module that is a part of a unit has no parameters to list. A program that asks it
for them, to freeze them or to train only them, is told so (:class:`Part`).
"""

import warnings
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.unit import Unit
from minifsdp.wrapping.module_tree import WRAPPER_PREFIX, Modules, clean, unit_of

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
        if module is not unit.module:  # that one lists the flat parameter
            part = Part(module)
            module.__dict__.update(
                named_parameters=part.named_parameters, requires_grad_=part.requires_grad_
            )


class Part:
    """Methods of one module that is a part of a unit: they say what they cannot know."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Part":
        return Part(memo[id(self._module())])  # of the module's copy, which is being made

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Also of ``parameters()``, ``zero_grad()`` and all else that asks for them."""
        module: Any = self._module()
        if missing := self._missing(recurse=kwargs.get("recurse", args[1:2] != (False,))):
            warnings.warn(f"{missing}. They are not listed here.", stacklevel=3)
        return type(module).named_parameters(module, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        module: Any = self._module()
        if missing := self._missing(recurse=True):
            raise RuntimeError(f"{missing}. They cannot be frozen or thawed one by one.")
        return type(module).requires_grad_(module, requires_grad)

    def _missing(self, recurse: bool) -> str:
        """Which parameters are sharded now; empty, if all are there."""
        module = self._module()
        unit = None if module is None else _unit_with(module)
        if module is None or unit is None or unit.uses_unsharded_views or unit.on_demand(unit):
            return ""
        inside = set(module.modules()) if recurse else {module}
        names = [s.name for s in unit.param_infos if any(owner in inside for owner, _ in s.owners)]
        return names and (
            f"the parameters {', '.join(names)} of {type(module).__name__} are a part of the flat "
            f"parameter of unit {unit.label} now. To freeze them, do it before you wrap the model; "
            f"optimizers and clipping take the whole model's parameters(); to read them, use "
            f"FSDP.summon_full_params(model)"
        )  # type: ignore[return-value]


def check_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Refuse ``module.name = param``, if the module's parameters are sharded now, or the parameter
    is a new one.

    Raises:
        RuntimeError: naming the unit and the parameter.
    """
    unit = _unit_with(module)
    if unit is None or isinstance(param, FlatParameter):
        return
    owned = next((info.name for info in unit.param_infos if (module, name) in info.owners), None)
    new = owned is None and param is not None
    if new or (owned is not None and not unit.uses_unsharded_views):
        for info, placeholder in zip(unit.param_infos, unit.placeholders, strict=True):
            if (module, name) in info.owners:
                module.__dict__[name] = placeholder  # torch has removed it by now
        raise RuntimeError(
            f"parameter {owned or name!r} of {type(module).__name__} in unit {unit.label} cannot "
            f"be added or replaced after wrapping. The unit was made of the parameters that there "
            f"were, and trains those; the gradients of another one would not be averaged. Change "
            f"the model before you wrap it. To set values, use FSDP.summon_full_params(model)."
        )


def check_tree(root: nn.Module) -> None:
    """Refuse modules whose parameters are in no unit, however they have come there.

    Raises:
        RuntimeError: naming one.
    """
    for name, module in root.named_modules():
        if _unit_with(module) is None and _holds(module):
            raise RuntimeError(
                f"{clean(name)!r} ({type(module).__name__}) has parameters that are in no unit. It "
                f"was put into the model after wrapping, and every rank would train it alone. "
                f"Change the model before you wrap it."
            )


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
    if unit is not None and any(module is m for info in unit.param_infos for m, _ in info.owners):
        return True
    params = module._parameters.values()
    return any(p is not None for p in params)


register_module_module_registration_hook(check_part)
register_module_parameter_registration_hook(check_parameter)

"""The modules and parameters of a unit cannot be replaced, added or removed after wrapping.

A unit has the parameters that its modules had when it was built. ::

    model.head = nn.Linear(8, 10)        RuntimeError: the new parameters would be in no unit; each
                                         rank would train them alone, and the ranks would differ
    del model.head                       RuntimeError: its values would stay in the flat parameter
    model.head = torch.compile(head)     fine: the same parameters, in a wrapper

torch calls registered hooks whenever a module or a parameter is put into a module. So a change is
refused at once, and no step has to look for it. :func:`check_tree` finds what has come in other
ways, until the first forward is over.

Between forwards, a module of a unit in chunks has no parameters to list, because the unit is
sharded. Asking such a module for its parameters, to freeze, train, save, load or convert only them,
gives a warning or an error (:class:`Part`).
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from minifsdp.core.layers import Layer
from minifsdp.dispatch_modes import never_compile_inside
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.divided_param import is_optimized, take_over, unit_of_param
from minifsdp.support.dtensors import divided_alike
from minifsdp.wrapping.module_tree import (
    WRAPPER_PREFIX,
    Modules,
    clean,
    ignore,
    ignored_by,
    is_ignored,
    unit_of,
)

WRAPPED = WRAPPER_PREFIX.rstrip(".")
FSDP_MARK = "_is_fsdp_managed_module"
MARKS = {FSDP_MARK: True, "_fsdp_use_orig_params": True}
"""Attributes that torch's FSDP gives to all modules of its units. The first one tells transformers
that all ranks have to run the same layers; a model that drops layers at random then runs all of
them. TorchDynamo asks for both."""
_INNER_FIRST = (
    "Wrap inner modules first, or let auto_wrap_policy do it. If two units share the module, make "
    "one unit of the smallest module around both."
)
_units: "WeakKeyDictionary[nn.Module, ref[FeaturedUnit]]" = WeakKeyDictionary()


def check_free(modules: Modules, advice: str = _INNER_FIRST) -> None:
    """Refuse to make a unit of modules whose parameters another unit has.

    Args:
        modules: by name.
        advice: a sentence for the end of the message.

    Raises:
        ValueError: naming the module and its unit.
    """
    for name, module in modules.items():
        if (unit := _unit_with(module)) is not None and _holds(module):
            raise ValueError(
                f"module {name or '<root>'!r} ({type(module).__name__}) is in unit {unit.label} "
                f"already, which has sharded its parameters. {advice}"
            )


def join(unit: FeaturedUnit, modules: Modules) -> None:
    """Record that these modules are in ``unit``."""
    for module in modules.values():
        _units[module] = ref(unit)
        module.__dict__.update(MARKS)
        # This makes torch's replicate() leave the module alone, or refuse it.
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
        if module is not unit.module:  # which lists the flat parameter, and can be frozen
            part = Part(module, unit)
            module.__dict__.update((name, getattr(part, name)) for name in _OF_PARTS)


class Part:
    """Replaces methods of a module that is in a unit.

    While a unit in chunks is sharded, the originals would list, freeze, save, load and convert
    nothing, silently.
    """

    def __init__(self, module: nn.Module, unit: FeaturedUnit | None) -> None:
        self._module = ref(module)
        # Kept here, and not looked up among all modules that are sharded: TorchDynamo would look at
        # each of them, and compile again whenever a model is made or gone.
        self._unit = ref(unit) if unit is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Part":
        return Part(memo[id(self._module())], None)  # for the module's copy, which is in no unit

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Called also by ``parameters()``, ``zero_grad()`` and everything else that lists them.

        Warns:
            UserWarning: some are sharded now, so the list is not complete.
        """
        module: Any = self._module()
        if missing := self._missing(recurse=kwargs.get("recurse", args[1:2] != (False,))):
            warnings.warn(f"{missing}. They are not listed here.", stacklevel=3)
        return type(module).named_parameters(module, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As for any module.

        Raises:
            RuntimeError: some parameters are sharded now. The unit is frozen as a whole.
        """
        module: Any = self._module()
        if missing := self._missing(recurse=True):
            raise RuntimeError(f"{missing}. They cannot be frozen or thawed one by one.")
        return type(module).requires_grad_(module, requires_grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module. A state dict of the whole model shows the unit before it comes here.

        Warns:
            UserWarning: some parameters are sharded now, so they are not in it.
        """
        module: Any = self._module()
        if missing := self._missing(recurse=True):
            warnings.warn(
                f"{missing}. They are not in this state dict, but in that of the whole model.",
                stacklevel=2,
            )
        return type(module).state_dict(module, *args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module. What loads the whole model does not come here.

        Raises:
            RuntimeError: some parameters are sharded now. With ``strict=False`` nothing would be
                loaded, and otherwise torch would call their names unexpected.
        """
        module: Any = self._module()
        if missing := self._missing(recurse=True):
            raise RuntimeError(f"{missing}. Load them with the whole model's, or inside of that.")
        return type(module).load_state_dict(module, *args, **kwargs)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Called by ``to()``, ``half()`` and ``cuda()``.

        Raises:
            RuntimeError: this module alone is to be converted or moved, and some of its parameters
                are sharded now.
        """
        module: Any = self._module()
        alone = sys._getframe(1).f_code.co_name != "_apply"  # of the module around this one
        if alone and (missing := self._missing(recurse=True)) and self._changes(fn):
            raise RuntimeError(f"{missing}. They cannot be converted or moved one by one.")
        return type(module)._apply(module, fn, *args, **kwargs)

    def _changes(self, fn: Any) -> bool:
        """Whether ``fn`` would give the unit's parameters another dtype or device."""
        assert self._unit is not None
        shard = cast(FeaturedUnit, self._unit()).padded_shard[:0]
        with torch.no_grad():
            made: torch.Tensor = fn(shard)
        return made.dtype != shard.dtype or made.device != shard.device

    def _missing(self, recurse: bool) -> str:
        """Which parameters are sharded now, in words; empty if none is."""
        module = self._module()
        unit = self._unit() if self._unit is not None else None
        if module is None or unit is None or unit.shows_views:
            return ""
        if torch._C._current_graph_task_id() >= 0 and unit.on_demand(unit):
            return ""  # in a forward it may be one rank alone that lists them
        if unit.mesh is not None:
            return ""  # in rows, they are DTensors now, which are listed and can be frozen
        inside = set(module.modules()) if recurse else {module}
        names = [s.name for s in unit.param_infos if any(owner in inside for owner, _ in s.owners)]
        return names and (
            f"the parameters {', '.join(names)} of {type(module).__name__} are a part of the flat "
            f"parameter of unit {unit.label} now. To freeze them, do it before you wrap the model; "
            f"optimizers and clipping take the whole model's parameters(); to read them, use "
            f"FSDP.summon_full_params(model)"
        )  # type: ignore[return-value]


_OF_PARTS = ("named_parameters", "requires_grad_", "state_dict", "load_state_dict", "_apply")


def check_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
    """Refuse ``module.name = param`` if the parameter is new, or replaces one that is sharded now.
    A replacement of an ignored parameter is ignored, too.

    A DTensor that is divided as the one it replaces is taken over: that is how
    ``load_state_dict(assign=True)`` loads into a unit in rows.

    While the unit is gathered, a replacement is found at the end of the forward (param_changes.py).

    Returns:
        What the module is to have in place of ``param``; None: ``param`` itself.

    Raises:
        RuntimeError: naming the unit and the parameter.
    """
    unit = _unit_with(module)
    if unit is None or unit_of_param(param) is unit:
        return None
    before: Any = module._parameters.get(name)
    if is_ignored(before):
        if param is not None:
            ignore(param, ignored_by(before))
        return None
    owned = next((info.name for info in unit.param_infos if (module, name) in info.owners), None)
    sharded = owned is not None and not unit.shows_views
    between_steps = isinstance(before, DTensor) and not unit.has_placeholders
    if sharded and between_steps and not is_optimized(param) and divided_alike(param, before):
        take_over(unit, before, param)
        return before
    new = owned is None and param is not None
    if new or sharded:
        for info, placeholder in zip(unit.param_infos, unit.placeholders, strict=True):
            if unit.has_placeholders and (module, name) in info.owners:
                module.__dict__[name] = placeholder  # torch has just removed it
        raise RuntimeError(
            f"parameter {owned or name!r} of {type(module).__name__} in unit {unit.label} cannot "
            f"be added or replaced after wrapping. The unit was made of the parameters that there "
            f"were, and trains those; the gradients of another one would not be averaged. Change "
            f"the model before you wrap it. To set values, use load_state_dict(), or "
            f"FSDP.summon_full_params(model)."
        )
    return None


def check_tree(root: nn.Module) -> None:
    """Refuse a model with parameters that are in no unit, in whatever way they have come there.

    Raises:
        RuntimeError: naming the first such module.
    """
    ignored = {inner for m in root.modules() if is_ignored(m) for inner in m.modules()}
    for name, module in root.named_modules():
        if _unit_with(module) is None and _holds(module) and module not in ignored:
            raise RuntimeError(
                f"{clean(name)!r} ({type(module).__name__}) has parameters that are in no unit. It "
                f"was put into the model after wrapping, and every rank would train it alone. "
                f"Change the model before you wrap it."
            )


def check_lists(units: Sequence[FeaturedUnit]) -> None:
    """Refuse a unit of several modules if some of them are not in the model: a step of the model
    gathers and reduces the unit, and calls of the modules outside would do so once more.

    Args:
        units: of one root; the first one is the root's own.

    Raises:
        RuntimeError: naming the unit, and the class of the module.
    """
    found = set(units[0].module.modules())
    for unit in units:
        for position, module in unit.module.named_children() if unit.is_list else ():
            if module not in found:
                raise RuntimeError(
                    f"unit {unit.label} was made of a list of modules, of which number {position} "
                    f"({type(module).__name__}) is not in this model (anymore?), which is what was "
                    f"given to fully_shard last. All modules of a list have to be in one model."
                )


@never_compile_inside  # torch calls it also where it makes a module to compile a backward
def check_part(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Refuse ``parent.name = child`` if that removes parameters from a unit, or brings new ones.

    Args:
        child: None if the module is deleted.

    Raises:
        RuntimeError: naming the unit and the modules.
    """
    unit = unit_of(parent) if WRAPPED in parent._modules else _unit_with(parent)
    if unit is None:
        return
    before, after = _holders(parent._modules.get(name)), _holders(child)
    if before.keys() == after.keys():
        return
    kind = type(parent._modules.get(WRAPPED, parent)).__name__
    changed = {after.get(m, before.get(m)) for m in before.keys() ^ after.keys()}
    parts = ", ".join(sorted(repr(clean(f"{name}.{part}").strip(".")) for part in changed))
    raise RuntimeError(
        f"{name!r} of {kind} in unit {unit.label} cannot be replaced, added or removed after "
        f"wrapping. The unit was made of the parameters that there were; {parts} would be missing "
        f"in it, or left over. Change the model before you wrap it. To set values, use "
        f"FSDP.summon_full_params(model)."
    )


def _unit_with(module: nn.Module) -> FeaturedUnit | None:
    unit = _units.get(module)
    return None if unit is None else unit()


def _holders(module: nn.Module | None) -> dict[nn.Module, str]:
    """The modules at and below ``module`` that have parameters, or had some before wrapping."""
    return {} if module is None else {m: n for n, m in module.named_modules() if _holds(m)}


def _holds(module: nn.Module) -> bool:
    """Whether the module itself has parameters, or had some that are in a unit now."""
    unit = _unit_with(module)
    if unit is not None and any(module is m for info in unit.param_infos for m, _ in info.owners):
        return True
    params = () if is_ignored(module) else module._parameters.values()
    return any(p is not None and not is_ignored(p) for p in params)


register_module_module_registration_hook(check_part)
register_module_parameter_registration_hook(check_parameter)


class Leaks(Layer):
    """Warns when somebody else refers to a parameter whose memory should have been freed."""

    def freed(self, unit: FeaturedUnit) -> None:
        """Warns UserWarning: naming the unit, once for each."""
        leaked, unit.leaked = unit.leaked, False
        # While an exception is on its way, its traceback refers to the views.
        if leaked and unit.leaks == 1 and sys.exc_info()[0] is None:
            warnings.warn(
                f"a parameter of unit {unit.label} is still referred to when the unit is freed (by "
                f"an output of its module, an attribute, a closure, a NumPy array?). It keeps the "
                f"values of this step, and {unit.unsharded.nbytes} bytes that would have been "
                f"freed. Keep a copy instead: parameter.detach().clone(). (A graph of "
                f"torch.autograd.grad(..., create_graph=True) has to keep it.)",
                stacklevel=3,
            )

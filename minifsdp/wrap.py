"""Where unit borders go.

A unit is gathered as a whole, so borders decide everything: one unit for the whole model saves no
memory at the peak, one for each layer sends many small messages. A good border is the block that a
model repeats. This file finds the modules to wrap, and checks that no parameter straddles a border.
"""

import gc
from collections.abc import Callable, Iterable, Mapping
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from minifsdp.unit import FlatParameter, Slot, Unit

WRAPPER_PREFIX = "_fsdp_wrapped_module."  # the name that torch gives it, in every state dict since

Policy = Callable[..., bool]
"""``policy(module=, recurse=, nonwrapped_numel=) -> bool``, as in torch: with ``recurse`` whether
to look inside ``module``, without whether to wrap it; ``nonwrapped_numel`` counts its elements that
no unit inside has taken."""


class ModuleWrapPolicy:
    """Wrap every module of the given classes in a unit of its own.

    Raises:
        TypeError: something given is not a class of modules.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = tuple(module_classes)
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(f"ModuleWrapPolicy takes classes of nn.Module, not {cls!r}")
        self.module_classes = classes

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.module_classes)


def clean(name: str) -> str:
    """A fully qualified name as it was before wrapping."""
    return name.replace(WRAPPER_PREFIX, "")


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that is a wrapper, else None."""
    unit = module.__dict__.get("_unit")
    return unit if isinstance(unit, Unit) else None


def select(root: nn.Module, policy: Policy) -> list[nn.Module]:
    """The modules below ``root`` that ``policy`` wants wrapped, inner ones before those around.
    Modules that are wrapped already, and all inside them, are left alone."""
    selected: list[nn.Module] = []
    seen = {root}
    for child in root.children():
        _select(child, policy, selected, seen)
    return selected


def _select(
    module: nn.Module, policy: Policy, selected: list[nn.Module], seen: set[nn.Module]
) -> int:
    """Extend ``selected`` and ``seen``; the number of elements that no selected module took."""
    if module in seen or unit_of(module) is not None:
        return 0
    seen.add(module)
    numel = sum(p.numel() for p in module.parameters() if not isinstance(p, FlatParameter))
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        own = sum(p.numel() for p in module.parameters(recurse=False))
        numel = own + sum(_select(child, policy, selected, seen) for child in module.children())
    if not policy(module=module, recurse=False, nonwrapped_numel=numel):
        return numel
    selected.append(module)
    return 0


def check_sharing(root: nn.Module, borders: list[nn.Module]) -> None:
    """Refuse a parameter that two units would own, before anything is changed.

    Raises:
        ValueError: naming the parameter in both places, and the module to wrap instead.
    """
    _check_sharing(root, "", root, "", borders, {})


def _check_sharing(
    module: nn.Module,
    name: str,
    unit: nn.Module,
    unit_name: str,
    borders: list[nn.Module],
    owners: dict[nn.Parameter, tuple[nn.Module, str, str]],  # its unit's module and name, its name
) -> None:
    if unit_of(module) is not None:
        return  # wrapped by hand; collect() finds what it shares with others
    if module in borders:
        unit, unit_name = module, name
    prefix = f"{name}." if name else ""
    for attribute, param in module._parameters.items():
        if param is not None:
            owner, owner_name, other = owners.setdefault(
                param, (unit, unit_name, prefix + attribute)
            )
            if owner is not unit:
                raise _shared(other, owner_name, prefix + attribute, unit_name)
    for attribute, child in module._modules.items():
        if child is not None:  # though it was visited under another name: it may be in two units
            _check_sharing(child, prefix + attribute, unit, unit_name, borders, owners)


def wrap_inside(
    root: nn.Module, borders: list[nn.Module], wrapper: Callable[[nn.Module], nn.Module]
) -> None:
    """Put ``wrapper(module)`` in the place, or the places, of each module in ``borders``."""
    places = [(parent, name, m) for parent in root.modules() for name, m in parent._modules.items()]
    for module in borders:
        wrapped = wrapper(module)
        for parent, name, child in places:
            if child is module:
                setattr(parent, name, wrapped)


def collect(module: nn.Module) -> tuple[list[Slot], list[nn.Parameter]]:
    """The parameters below ``module`` that no inner unit has. A shared one has several owners.

    Raises:
        ValueError: an inner unit has taken one of them, which a module outside it holds as well.
    """
    slots: dict[nn.Parameter, Slot] = {}
    for module_name, owner in module.named_modules():
        for attribute, param in owner._parameters.items():
            if param is None or isinstance(param, FlatParameter):
                continue
            name = clean(f"{module_name}.{attribute}" if module_name else attribute)
            taken = getattr(param, "_minifsdp_taken", None)
            if taken is not None:
                inner, its_name = taken
                where = {unit_of(m): clean(n) for n, m in module.named_modules()}.get(inner())
                if where is None:  # not below this module: a sibling, of which no name is known
                    raise _shared(its_name, "another unit", name, "this one")
                raise _shared(f"{where}.{its_name}", where, name, "")
            slot = slots.setdefault(param, Slot(name, param.shape))
            slot.owners.append((owner, attribute))
    return list(slots.values()), list(slots)


def mark_taken(unit: Unit, params: list[nn.Parameter]) -> None:
    """Leave a note on the original parameters, for a module elsewhere that holds one of them."""
    for slot, param in zip(unit.slots, params, strict=True):
        param._minifsdp_taken = (ref(unit), slot.name)  # type: ignore[attr-defined]


def check_optimizers(originals: Mapping[str, "ref[nn.Parameter]"]) -> None:
    """Refuse an optimizer that was built before wrapping: it would step tensors nobody uses.

    Args:
        originals: the parameters as they were, by name. Nobody should still hold them.

    Raises:
        RuntimeError: an optimizer does.
    """
    alive = {id(param): name for name, r in originals.items() if (param := r()) is not None}
    if not alive:
        return
    for candidate in gc.get_objects():  # a long walk; only when somebody does hold an original
        if issubclass(type(candidate), Optimizer):  # isinstance would wake up lazy proxies
            held = [
                alive[id(p)] for g in candidate.param_groups for p in g["params"] if id(p) in alive
            ]
            if held:
                raise RuntimeError(
                    f"an optimizer ({type(candidate).__name__}) was built before wrapping. It "
                    f"holds {', '.join(held)}, which wrapping has replaced by a sharded flat "
                    f"parameter, so its steps would change nothing. Build it after wrapping, "
                    f"from the wrapped model's parameters()."
                )


def _shared(first: str, first_unit: str, second: str, second_unit: str) -> ValueError:
    a, b = first.split(".")[:-1], second.split(".")[:-1]
    common = []
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        common.append(x)
    instead = repr(".".join(common)) if common else "the root"
    units = " and ".join(repr(unit) if unit else "the root" for unit in (first_unit, second_unit))
    return ValueError(
        f"{first!r} and {second!r} are one parameter, but they are in different units ({units}). "
        f"Units gather and free their parameters each by itself, so the two would part and drift. "
        f"Let one unit own both: wrap {instead}, the smallest module that holds both, and "
        f"neither of the two below it."
    )

"""Where the boundaries between units go.

A unit is gathered as a whole, so the choice of units decides both memory and speed. One unit for
the whole model saves no memory at the peak, and one unit for each layer sends many small messages.
A good unit is the block that a model repeats::

    GPT                      the root's unit: embedding, norm, head
      blocks.0   -> FSDP     a unit
      blocks.1   -> FSDP     a unit

A *policy* chooses the modules: a function of a module, which says whether it becomes a unit. The
root becomes one in any case, and with ``ModuleWrapPolicy({Block})`` so does every block.

The name and argument of that class are those of ``torch.distributed.fsdp.wrap``. Policies that are
asked what to look into, that count parameters, or that answer with settings for a unit are in
minifsdp's wrapping/policies.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .flatten import check_flattenable
from .unit import ParamInfo


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers, such as ``nn.ModuleList``, cannot: there would be
    no moment to gather their units."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


class ModuleWrapPolicy:
    """Wrap every module of the given classes in a unit of its own."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = tuple(module_classes)

    def __call__(self, module: nn.Module) -> bool:
        return isinstance(module, self.module_classes)


def select(
    root: nn.Module, policy: Callable[[nn.Module], bool], is_taken: Callable[[Any], bool]
) -> dict[nn.Module, None]:
    """The modules below ``root`` that ``policy`` wants, inner ones before those around them.

    Args:
        is_taken: whether a module, with all below it, belongs to units already. The policy is not
            asked about it.
    """
    selected: dict[nn.Module, None] = {}  # a module may be in two places
    for child in root.children():
        if not is_taken(child):
            selected |= select(child, policy, is_taken)
            if policy(child):
                selected[child] = None
    return selected


def wrap_inside(
    root: nn.Module,
    to_wrap: Mapping[nn.Module, dict[str, Any]],
    wrapper: Callable[..., nn.Module],
) -> None:
    """Put ``wrapper(module, **arguments)`` in all places of each module in ``to_wrap``."""
    places = [(parent, name, m) for parent in root.modules() for name, m in parent._modules.items()]
    for module, arguments in to_wrap.items():
        wrapped = wrapper(module, **arguments)
        for parent, name, child in places:
            if child is module:
                setattr(parent, name, wrapped)


def params_of_units(
    root: nn.Module, wrapped: Collection[nn.Module], is_taken: Callable[[Any], bool]
) -> dict[nn.Module, list[ParamInfo]]:
    """The parameters of the units of ``root`` and of ``wrapped``, modules below it.

    Args:
        is_taken: whether a module or a parameter belongs to a unit already.

    Raises:
        ValueError: two units would have one parameter; the module of a unit has no forward; the
            parameters of a unit cannot share one flat tensor.
    """
    units: dict[nn.Module, list[ParamInfo]] = {module: [] for module in (root, *wrapped)}
    names = {module: name for name, module in root.named_modules()}
    found: dict[nn.Parameter, tuple[nn.Module, ParamInfo]] = {}
    to_visit = [(root, root, "")]  # a module, that of its unit, and its name below that
    while to_visit:
        module, unit, name = to_visit.pop()
        if is_taken(module):
            continue
        unit, prefix = (module, "") if module in units else (unit, name)
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            info = ParamInfo(prefix + attribute, param.shape)
            owner, info = found.setdefault(param, (unit, info))
            if owner is not unit or is_taken(param):
                raise ValueError(
                    f"{prefix + attribute!r} of {names[unit] or 'the root'} is in another unit as "
                    f"well. Units gather and free their parameters each by itself, so the two "
                    f"would part and drift. Wrap the smallest module that holds both, and neither "
                    f"of the two below it."
                )
            if not info.owners:
                units[unit].append(info)
            if (module, attribute) not in info.owners:  # a module may be in two places
                info.owners.append((module, attribute))
        for attribute, child in reversed(module._modules.items()):  # the last is visited first
            if child is not None:
                to_visit.append((child, unit, f"{prefix}{attribute}."))
    for module, infos in units.items():
        if not has_forward(module):
            raise ValueError(
                f"{names[module] or 'the root'} ({type(module).__name__}) has no forward, so there "
                f"is no moment to gather its unit. Wrap the modules in it, or the one around it."
            )
        check_flattenable({info.name: info.parameter for info in infos})
    return units

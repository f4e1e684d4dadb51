"""Where unit borders go.

A unit is gathered as a whole, so borders decide everything: one unit for the whole model saves no
memory at the peak, one for each layer sends many small messages. A good border is the block that a
model repeats. This file finds the modules to wrap, and checks that no parameter straddles a border.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from minifsdp.support.flat_parameter import FlatParameter
from minifsdp.support.param_access import ParamInfo
from minifsdp.wrapping.module_tree import clean, own_modules, unit_of
from minifsdp.wrapping.orig_params import taken_by
from minifsdp.wrapping.policies import Policy, has_forward


def select(root: nn.Module, policy: Policy) -> dict[nn.Module, dict[str, Any]]:
    """The modules below ``root`` that ``policy`` wants wrapped, inner ones before those around, and
    settings that each should have of its own. Wrapped modules and all inside are left alone.

    Raises:
        TypeError: ``policy`` is not a policy.
        ValueError: it wants something wrapped that cannot be.
    """
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy takes a policy, such as ModuleWrapPolicy({{Block}}), not {policy!r}"
        )
    selected: dict[nn.Module, dict[str, Any]] = {}
    seen = {root}
    if policy(module=root, recurse=True, nonwrapped_numel=_numel(_free(root))):
        for child in root.children():
            _select(child, policy, selected, seen)
    for name, module in root.named_modules():
        if module in selected:
            check_wrappable(module, name, selected.keys() - {module})
    return selected


def _select(
    module: nn.Module,
    policy: Policy,
    selected: dict[nn.Module, dict[str, Any]],
    seen: set[nn.Module],
) -> set[nn.Parameter]:
    """Extend ``selected`` and ``seen``; the parameters that no selected module took."""
    if module in seen or unit_of(module) is not None:
        return set()
    seen.add(module)
    free = _free(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=_numel(free)):
        return free
    free = set(module.parameters(recurse=False))
    for child in module.children():
        free |= _select(child, policy, selected, seen)
    answer = policy(module=module, recurse=False, nonwrapped_numel=_numel(free))
    if not answer or not (free or has_forward(module)):  # a container, with nothing to gather
        return free
    selected[module] = answer if isinstance(answer, dict) else {}
    return set()


def _free(module: nn.Module) -> set[nn.Parameter]:
    return {param for param in module.parameters() if not isinstance(param, FlatParameter)}


def _numel(params: set[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)  # a shared one counts once


def check_wrappable(module: nn.Module, name: str = "", borders: Container[nn.Module] = ()) -> None:
    """Refuse a wrapper; and a container, such as ``nn.ModuleList``, whose parameters would be its
    own unit's: they would never be gathered. It may be wrapped if those in it are.

    Args:
        borders: modules below that will be wrapped.

    Raises:
        ValueError: it is one.
    """
    if unit_of(module) is not None:
        raise ValueError("the module is a FullyShardedDataParallel already. Wrap a module once.")
    left = None if has_forward(module) else next(_left(module, "", borders), None)
    if left is not None:
        what = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
        raise ValueError(
            f"{what} has no forward, so there is no moment to gather its unit, which would have "
            f"{left!r}. Wrap the modules in it (auto_wrap_policy=ModuleWrapPolicy({{...}}) with "
            f"their classes does), or the one that holds it."
        )


def _left(module: nn.Module, prefix: str, borders: Container[nn.Module]) -> Iterator[str]:
    """The names of the parameters at and below ``module`` that are in none of ``borders``."""
    if unit_of(module) is None:
        yield from (prefix + name for name, p in module._parameters.items() if p is not None)
        for name, child in module.named_children():
            if child not in borders:
                yield from _left(child, f"{prefix}{name}.", borders)


def check_sharing(root: nn.Module, borders: Iterable[nn.Module]) -> None:
    """Refuse a parameter that two units would own, before anything is changed.

    Raises:
        ValueError: naming the parameter in both places, and the module to wrap instead.
    """
    _check_sharing(root, "", root, "", set(borders), {})


def _check_sharing(
    module: nn.Module,
    name: str,
    unit: nn.Module,
    unit_name: str,
    borders: set[nn.Module],
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
    root: nn.Module,
    borders: Mapping[nn.Module, dict[str, Any]],
    wrapper: Callable[..., nn.Module],
) -> None:
    """Put ``wrapper(module, **settings)`` in the place, or places, of each one in ``borders``."""
    places = [(parent, name, m) for parent in root.modules() for name, m in parent._modules.items()]
    for module, settings in borders.items():
        wrapped = wrapper(module, **settings)
        for parent, name, child in places:
            if child is module:
                setattr(parent, name, wrapped)


def collect(module: nn.Module) -> list[ParamInfo]:
    """The parameters below ``module`` that no inner unit has. A shared one has several owners.

    Raises:
        ValueError: an inner unit has taken one of them, which a module outside it holds as well.
    """
    param_infos: dict[nn.Parameter, ParamInfo] = {}
    for module_name, owner in own_modules(module).items():
        for attribute, param in owner._parameters.items():
            if param is None or isinstance(param, FlatParameter):
                continue
            name = clean(f"{module_name}.{attribute}" if module_name else attribute)
            unit, its_name = taken_by(param)
            if unit is not None:
                where = {unit_of(m): clean(n) for n, m in module.named_modules()}.get(unit)
                if where is None:  # not below this module: a sibling, of which no name is known
                    raise ValueError(
                        f"{name!r} of this unit and {its_name!r} of one that was wrapped before "
                        f"are one parameter. " + _ADVICE.format("the smallest module around both")
                    )
                raise _shared(f"{where}.{its_name}", where, name, "")
            info = param_infos.setdefault(param, ParamInfo(name, param.shape))
            info.owners.append((owner, attribute))
    return list(param_infos.values())


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
        + _ADVICE.format(f"{instead}, the smallest module that holds both")
    )


_ADVICE = (
    "Units gather and free their parameters each by itself, so the two would part and drift. Let "
    "one unit own both: wrap {}, and neither of the two below it."
)

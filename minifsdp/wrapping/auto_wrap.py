"""The modules to wrap, and refusals: a parameter that two units would have, a unit without a call.

core/auto_wrap.py asks the policy. Here is what may be in the way: wrappers that are there already,
modules and parameters that are ignored, containers.
"""

from collections.abc import Collection, Iterator
from itertools import takewhile
from typing import Any

from torch import nn

from minifsdp.chunks.param_attributes import attributes_of
from minifsdp.core import auto_wrap
from minifsdp.core.auto_wrap import Policy, has_forward
from minifsdp.support.divided_param import is_optimized
from minifsdp.support.dtensors import local_of
from minifsdp.support.param_access import ParamInfo
from minifsdp.wrapping.module_tree import (
    clean,
    is_ignored,
    join_names,
    own_modules,
    own_params,
    unit_of,
)
from minifsdp.wrapping.orig_params import unit_of_orig_param


def select(root: nn.Module, policy: Policy) -> dict[nn.Module, dict[str, Any]]:
    """Ask ``policy`` which modules below ``root`` to wrap. It is not asked about wrappers, what is
    ignored, and what is below them. See :func:`minifsdp.core.auto_wrap.select`.

    Raises:
        TypeError: ``policy`` is not a policy.
        ValueError: the policy wants to wrap something that cannot be wrapped.
    """
    selected = auto_wrap.select(root, policy, _left_alone)
    for name, module in root.named_modules():
        if module in selected:
            check_wrappable(module, name, selected.keys() - {module})
    return selected


def _left_alone(item: Any) -> bool:
    if isinstance(item, nn.Module) and unit_of(item) is not None:
        return True
    return is_optimized(item) or is_ignored(item)


def check_wrappable(module: nn.Module, name: str = "", to_wrap: Collection[nn.Module] = ()) -> None:
    """Refuse to wrap a wrapper, or a container, such as ``nn.ModuleList``, that has parameters
    outside of other units: a container is not called, so its unit would never be gathered.

    Args:
        to_wrap: modules below that will be wrapped.

    Raises:
        ValueError: it is one.
    """
    what = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
    if unit_of(module) is not None:
        raise ValueError(f"{what} is a unit of FSDP already. Wrap a module once.")
    param = None if has_forward(module) else next(_params_outside(module, "", to_wrap), None)
    if param is not None:
        raise ValueError(
            f"{what} has no forward, so there is no moment to gather its unit, which would have "
            f"{param!r}. Wrap the modules in it (auto_wrap_policy=ModuleWrapPolicy({{...}}) with "
            f"their classes does), or the one that holds it."
        )


def _params_outside(
    module: nn.Module, prefix: str, to_wrap: Collection[nn.Module]
) -> Iterator[str]:
    """The names of the parameters at and below ``module`` that are in no wrapper and in none of
    ``to_wrap``."""
    if unit_of(module) is None:
        for name, param in module._parameters.items():
            if param is not None and not is_ignored(param):
                yield join_names(prefix, name)
        for name, child in module.named_children():
            if child not in to_wrap:
                yield from _params_outside(child, join_names(prefix, name), to_wrap)


def check_sharing(root: nn.Module, to_wrap: Collection[nn.Module]) -> None:
    """Refuse a parameter that two units would have, before anything is changed.

    Args:
        to_wrap: modules below ``root`` that will be wrapped, as ``root`` will.

    Raises:
        ValueError: naming the parameter in both places, and the module to wrap instead.
    """
    _check_sharing(root, "", "", to_wrap, {}, {})


def _check_sharing(
    module: nn.Module,
    name: str,
    unit: str,
    to_wrap: Collection[nn.Module],
    found: dict[nn.Parameter, tuple[str, str]],  # the name of its unit, and its own name
    unit_names: dict[nn.Module, str],  # the first name: a module in two places is one unit
) -> None:
    if unit_of(module) is not None or is_ignored(module):
        return  # wrapped by hand; make_param_infos() finds what it shares with others
    if module in to_wrap:
        unit = unit_names.setdefault(module, name)
    for attribute, param in module._parameters.items():
        if param is not None and not is_ignored(param):
            here = join_names(name, attribute)
            other_unit, there = found.setdefault(param, (unit, here))
            if other_unit != unit:
                raise _shared(there, other_unit, here, unit)
    for attribute, child in module._modules.items():
        if child is not None:  # also if it was visited: another name may be in another unit
            _check_sharing(child, join_names(name, attribute), unit, to_wrap, found, unit_names)


def make_param_infos(module: nn.Module) -> list[ParamInfo]:
    """The parameters below ``module`` that are in no unit inside. A shared one has several owners.

    Raises:
        ValueError: one of them is in another unit, which has a module that shares it.
    """
    param_infos: dict[nn.Parameter, ParamInfo] = {}
    for name, attribute in own_params(own_modules(module)).items():
        param = attribute.get()
        unit, name_there = unit_of_orig_param(param)
        if unit is not None:
            names = {m: n for n, m in module.named_modules()}
            its_name = ", ".join(clean(n) for m, n in names.items() if unit_of(m) is unit)
            owners = [i.owners[0] for i in unit.param_infos if i.name == name_there]
            there = next((owner for owner in owners if owner.module in names), None)
            if there is None:  # it is not below this module, so its name in the model is not known
                raise ValueError(
                    f"{name!r} of this unit and {name_there!r} of one that was wrapped before "
                    f"are one parameter. " + _ADVICE.format("the smallest module around both")
                )
            first = clean(join_names(names[there.module], there.name))
            raise _shared(first, its_name, name, "")
        if param not in param_infos:
            shape, attributes = local_of(param).shape, attributes_of(param)
            spec = getattr(param, "_spec", None)  # of a DTensor
            param_infos[param] = ParamInfo(name, shape, attributes=attributes, spec=spec)
        param_infos[param].owners.append(attribute)
    return list(param_infos.values())


def _shared(first: str, first_unit: str, second: str, second_unit: str) -> ValueError:
    pairs = zip(first.split(".")[:-1], second.split(".")[:-1], strict=False)
    common = ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    instead = repr(common) if common else "the root"
    units = " and ".join(repr(unit) if unit else "the root" for unit in (first_unit, second_unit))
    return ValueError(
        f"{first!r} and {second!r} are one parameter, but they are in different units ({units}). "
        + _ADVICE.format(f"{instead}, the smallest module that holds both")
    )


_ADVICE = (
    "Units gather and free their parameters each by itself, so the two would part and drift. Let "
    "one unit own both: wrap {}, and neither of the two below it."
)

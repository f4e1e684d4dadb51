"""The modules to wrap, and refusals: a parameter that two units would have, a unit without a call.

A *policy* chooses the modules. In the core (core/auto_wrap.py) it is asked one question: does a
module become a unit? Here it is asked twice about a module. Before its children: ``recurse=True``,
look inside? After its children: ``recurse=False``, does it become a unit? The second answer may be
a dict of arguments that this unit's wrapper gets in place of the root's. For blocks of two linear
layers and ``ModuleWrapPolicy({Block})``::

    root   recurse=True -> True
      block  recurse=True -> True
        linear, linear    recurse=True -> True, recurse=False -> False
      block  recurse=False -> True: a unit

This file also handles what may be in the way: wrappers that are there already, ignored modules and
parameters, and containers.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import takewhile
from typing import Any

from torch import nn

from minifsdp.chunks.param_attributes import attributes_of
from minifsdp.core.auto_wrap import has_forward
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

Answer = bool | dict[str, Any]
Policy = Callable[..., Answer]
"""``policy(module=, recurse=, nonwrapped_numel=)``. ``nonwrapped_numel`` is the number of elements
of the parameters at and below ``module`` that are in no unit inside."""


def select(root: nn.Module, policy: Policy) -> dict[nn.Module, dict[str, Any]]:
    """Ask ``policy`` which modules below ``root`` to wrap. It is not asked about wrappers, about
    what is ignored, or about what is below these, and it does not count their parameters.

    Returns:
        The modules, inner ones before those around them, each with the arguments that the policy
        gives for its wrapper alone.

    Raises:
        TypeError: ``policy`` is not a policy.
        ValueError: the policy wants to wrap something that cannot be wrapped.
    """
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy takes a policy, such as ModuleWrapPolicy({{Block}}), not {policy!r}"
        )
    selected: dict[nn.Module, dict[str, Any]] = {}
    seen = {root}
    if policy(module=root, recurse=True, nonwrapped_numel=_numel(_params(root))):
        for child in root.children():
            _select(child, policy, selected, seen)
    for name, module in root.named_modules():
        if module in selected:
            check_wrappable(module, name, selected.keys() - {module})
    return selected


# Functions of the module, not inside of those that call them: an inner function that calls itself
# is a reference cycle. It would keep the original parameters, the memory of a whole model, until
# the garbage collector comes.


def _select(
    module: nn.Module,
    policy: Policy,
    selected: dict[nn.Module, dict[str, Any]],
    seen: set[nn.Module],
) -> set[nn.Parameter]:
    """Select at and below ``module``. Returns the parameters that are in no selected module."""
    if module in seen or unit_of(module) is not None or is_ignored(module):
        return set()
    seen.add(module)
    params = _params(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=_numel(params)):
        return params
    params = _params(module, recurse=False)
    for child in module.children():
        params |= _select(child, policy, selected, seen)
    answer = policy(module=module, recurse=False, nonwrapped_numel=_numel(params))
    if not answer or not (params or has_forward(module)):  # a container without own parameters
        return params
    selected[module] = answer if isinstance(answer, dict) else {}
    return set()


def _params(module: nn.Module, recurse: bool = True) -> set[nn.Parameter]:
    found = module.parameters(recurse)
    return {param for param in found if not (is_optimized(param) or is_ignored(param))}


def _numel(params: set[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)  # a shared parameter counts once


def check_wrappable(module: nn.Module, name: str = "", to_wrap: Collection[nn.Module] = ()) -> None:
    """Refuse to wrap a wrapper, or a container, such as ``nn.ModuleList``, that has parameters
    outside of other units: a container is not called, so its unit would never be gathered.

    Args:
        to_wrap: modules below that will be wrapped.

    Raises:
        ValueError: ``module`` is one of these.
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
        ValueError: a module of another unit shares one of them.
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

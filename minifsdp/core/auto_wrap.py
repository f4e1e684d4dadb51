"""Where the boundaries between units go.

A unit is gathered as a whole, so the choice of units decides both memory and speed. One unit for
the whole model saves no memory at the peak, and one unit for each layer sends many small messages.
A good unit is the block that a model repeats::

    GPT                      the root's unit: embedding, norm, head
      blocks.0   -> FSDP     a unit
      blocks.1   -> FSDP     a unit

A *policy* chooses the modules. It is a function that is asked twice about a module. Before its
children: ``recurse=True``, look inside? After its children: ``recurse=False``, does it become a
unit? (The root becomes one in any case.) To the second question it may answer with a dict of
arguments that this unit's wrapper gets in place of the root's. For blocks of two linear layers and
``ModuleWrapPolicy({Block})``::

    root   recurse=True -> True
      block  recurse=True -> True
        linear, linear    recurse=True -> True, recurse=False -> False
      block  recurse=False -> True: a unit

The names and arguments are those of ``torch.distributed.fsdp.wrap``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .flatten import check_flattenable
from .unit import ParamInfo

Answer = bool | dict[str, Any]
Policy = Callable[..., Answer]
"""``policy(module=, recurse=, nonwrapped_numel=)``. ``nonwrapped_numel`` is the number of elements
of the parameters at and below ``module`` that are in no unit inside."""


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers, such as ``nn.ModuleList``, cannot: there would be
    no moment to gather their units."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


class ModuleWrapPolicy:
    """Wrap every module of the given classes in a unit of its own.

    Raises:
        TypeError: something given is not a class of modules.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = classes_of(module_classes, "ModuleWrapPolicy")

    def __call__(self, module: nn.Module, recurse: bool = False, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.module_classes)


def select(
    root: nn.Module, policy: Policy, left_alone: Callable[[Any], bool]
) -> dict[nn.Module, dict[str, Any]]:
    """Ask ``policy`` which modules below ``root`` to wrap.

    Args:
        left_alone: whether a module, with all below it, or a parameter belongs to a unit already,
            or to none. The policy is not asked about these modules, and these parameters do not
            count for it.

    Returns:
        The modules, inner ones before those around them, each with the arguments of its own that
        the policy has for its wrapper.

    Raises:
        TypeError: ``policy`` is not a policy.
    """
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy takes a policy, such as ModuleWrapPolicy({{Block}}), not {policy!r}"
        )
    selected: dict[nn.Module, dict[str, Any]] = {}
    seen = {root}
    numel = _numel(_params(root, left_alone))
    if policy(module=root, recurse=True, nonwrapped_numel=numel):
        for child in root.children():
            _select(child, policy, left_alone, selected, seen)
    return selected


# Not functions inside of those that call them: a function that calls itself there is in a circle
# with all that it refers to, and would keep the original parameters until the garbage collector
# comes, which is the memory of a whole model.


def _select(
    module: nn.Module,
    policy: Policy,
    left_alone: Callable[[Any], bool],
    selected: dict[nn.Module, dict[str, Any]],
    seen: set[nn.Module],
) -> set[nn.Parameter]:
    """Select at and below ``module``; the parameters that are in no selected module."""
    if module in seen or left_alone(module):
        return set()
    seen.add(module)
    params = _params(module, left_alone)
    if not policy(module=module, recurse=True, nonwrapped_numel=_numel(params)):
        return params
    params = _params(module, left_alone, recurse=False)
    for child in module.children():
        params |= _select(child, policy, left_alone, selected, seen)
    answer = policy(module=module, recurse=False, nonwrapped_numel=_numel(params))
    if not answer or not (params or has_forward(module)):  # a container without own parameters
        return params
    selected[module] = answer if isinstance(answer, dict) else {}
    return set()


def _params(
    module: nn.Module, left_alone: Callable[[Any], bool], recurse: bool = True
) -> set[nn.Parameter]:
    return {param for param in module.parameters(recurse) if not left_alone(param)}


def _numel(params: set[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)  # a shared parameter counts once


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
    root: nn.Module, wrapped: Collection[nn.Module], left_alone: Callable[[Any], bool]
) -> dict[nn.Module, list[ParamInfo]]:
    """The parameters of the units of ``root`` and of ``wrapped``, modules below it.

    Args:
        left_alone: as in :func:`select`.

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
        if left_alone(module):
            continue
        unit, prefix = (module, "") if module in units else (unit, name)
        for attribute, param in module._parameters.items():
            if param is None:
                continue
            info = ParamInfo(prefix + attribute, param.shape)
            owner, info = found.setdefault(param, (unit, info))
            if owner is not unit or left_alone(param):
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
        if infos and not has_forward(module):
            raise ValueError(
                f"{names[module] or 'the root'} ({type(module).__name__}) has no forward, so there "
                f"is no moment to gather its unit, which would have {infos[0].name!r}. Wrap the "
                f"modules in it, or the one that holds it."
            )
        check_flattenable({info.name: info.parameter for info in infos})
    return units


def classes_of(given: Iterable[type[nn.Module]], where: str) -> tuple[type[nn.Module], ...]:
    """These classes of modules; ``where`` is what they were given to.

    Raises:
        TypeError: something given is not a class of modules.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"{where} takes a set of classes, as {{nn.Linear}}, not {given!r}")
    classes = tuple(given)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{where} takes classes of nn.Module, not {cls!r}")
    return classes

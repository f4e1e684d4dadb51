"""Modules and parameters that a wrapper leaves alone: ``ignored_modules`` and ``ignored_states``.

Some parts of a model are distributed in another way, or not at all: experts that each rank has for
itself, an embedding with sparse gradients, a frozen encoder that is small. ::

    FSDP(model, ignored_modules=[model.experts], auto_wrap_policy=...)

    model                    the root's unit
      blocks.0   -> FSDP     a unit
      experts                in no unit: ordinary parameters, whole on this rank

What is ignored stays what it would be without a wrapper. Its parameters are in ``parameters()``, in
state dicts and in optimizers, under their names. They are not sharded, moved, cast, given memory or
sent to other ranks, and **their gradients are not reduced**: each rank has its own, and the program
averages them, if they are to be alike. Buffers of ignored modules are left alone in the same way.

A parameter that is ignored in one place is ignored in all places below the wrapped module, as in
PyTorch: no unit can shard a tensor that an ignored module computes with. Wrappers made by
``auto_wrap_policy`` ignore the same, and those around a wrapper ignore what that one does.

Source: ``torch.distributed.fsdp`` (pytorch 2.13), ``_get_ignored_modules``, whose arguments these
are. PyTorch lets some mistakes pass that are refused here, since the tensors would drift apart: to
ignore what an inner unit has sharded, and to shard in one wrapper what another one ignores.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed._composable.contract import _get_registry

from minifsdp.checks.members import check_free
from minifsdp.support.divided_param import is_optimized
from minifsdp.wrapping.module_tree import (
    clean,
    ignore,
    ignored_by,
    own_modules,
    unit_of,
)
from minifsdp.wrapping.orig_params import unit_of_orig_param

_being_wrapped: list[nn.Module] = []  # outer ones first, whose policies wrap the inner ones


@contextmanager
def ignoring(
    module: nn.Module, ignored_modules: Any = None, ignored_states: Any = None
) -> Iterator[None]:
    """Mark what the wrapper of ``module`` is to ignore. The wrapper is built inside of the block.
    If that is refused, nothing is marked.

    Args:
        ignored_modules: modules, which are ignored with all below them, except units that are
            wrapped already. What is not below ``module`` is left out: a program may give the same
            list to several wrappers.
        ignored_states: parameters; or modules, as in ``ignored_modules``.

    Raises:
        TypeError: an argument is no iterable of these.
        ValueError: both are given; ``module`` itself is to be ignored; what is to be ignored is
            sharded already; or a wrapper that is not below ``module`` ignores a part of ``module``.
    """
    items = _items(ignored_modules, ignored_states)
    marked = _mark(module, [*items, *_replicated(module)])
    _being_wrapped.append(module)
    try:
        _check_elsewhere(module)
        yield
    except BaseException:
        for item, before in marked:
            ignore(item, before)
        raise
    finally:
        _being_wrapped.pop()


def params_only(ignored_params: Any) -> list[nn.Parameter]:
    """The argument ``ignored_params`` of ``fully_shard``, as a list.

    Raises:
        TypeError: it is no iterable of parameters.
    """
    return _checked("ignored_params", ignored_params, nn.Parameter)


def _replicated(module: nn.Module) -> list[nn.Module]:
    """The modules below ``module`` that torch's ``replicate()`` averages the gradients of.

    Raises:
        ValueError: ``module`` itself is one of them.
    """
    found = [m for m in module.modules() if "replicate" in (_get_registry(m) or ())]
    if module in found:
        raise ValueError(
            f"replicate() has {type(module).__name__} already, whole on each rank, so it cannot be "
            f"sharded. Leave replicate() out, and for replicas give a mesh of (replicate, shard); "
            f"or shard parts of the model first, and then call replicate() for the rest."
        )
    return found


def _items(ignored_modules: Any, ignored_states: Any) -> list[Any]:
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ignored_modules and ignored_states were given together. Leave out ignored_modules: "
            "ignored_states takes modules, too."
        )
    if ignored_modules is not None:
        return _checked("ignored_modules", ignored_modules, nn.Module)
    states = _checked("ignored_states", ignored_states, nn.Module, nn.Parameter)
    kind = nn.Parameter if any(isinstance(state, nn.Parameter) for state in states) else nn.Module
    return _checked("ignored_states", states, kind)


def _checked(argument: str, given: Any, *kinds: type) -> list[Any]:
    """``given`` as a list, if all of it is of these kinds."""
    what = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    if not isinstance(given, Iterable) and given is not None:
        raise TypeError(
            f"{argument} takes a list of {what}, not {type(given).__name__}: put it in a list."
        )
    items = list(given or ())
    for item in items:
        if not isinstance(item, kinds):
            raise TypeError(
                f"{argument} takes a list of {what}, all of one kind; there is a "
                f"{type(item).__name__} among {len(items)}."
            )
    return items


def _known(module: nn.Module) -> set[nn.Module]:
    """The modules whose wrappers may ignore a part of ``module`` while it is wrapped."""
    units = (unit_of(inner) for inner in module.modules())
    # unit.module of a list of modules is a ListedModules, which is not below ``module`` itself.
    inner_ones = (unit.module for unit in units if unit is not None)
    return {module, *inner_ones, *_being_wrapped}


def _mark(module: nn.Module, items: list[Any]) -> list[tuple[Any, nn.Module | None]]:
    """Mark the items below ``module``. Returns those that were not marked, or were marked by a
    wrapper that does not count here, each with the module of the wrapper that had marked it."""
    names: dict[Any, str] = {m: clean(f"{n}.").strip(".") for n, m in module.named_modules()}
    for prefix, inner in list(names.items()):
        for name, param in prefix._parameters.items():
            names.setdefault(param, f"{inner}.{name}".lstrip("."))
    wanted: dict[Any, str] = {}
    for item in items:
        if isinstance(item, nn.Module):
            wanted |= _subtree(item, module, names)
        else:
            _check_unsharded(item, names.get(item, ""))
            wanted[item] = names.get(item, "")
    known = _known(module)
    new = [(item, ignored_by(item)) for item in wanted if item in names]
    new = [(item, before) for item, before in new if before not in known]
    for item, _ in new:
        ignore(item, module)
    return new


def _subtree(item: nn.Module, module: nn.Module, names: dict[Any, str]) -> dict[Any, str]:
    """``item`` and what is below it, modules and parameters, by name.

    Raises:
        ValueError: it cannot be ignored.
    """
    cls, name = type(item).__name__, names.get(item, "")
    if any(inner is module for inner in item.modules()):
        raise ValueError(
            f"{cls} is to be wrapped and to be ignored: nothing would be sharded. Leave it as it "
            f"is, without a wrapper, or ignore a part of it."
        )
    if (unit := unit_of(item)) is not None:
        raise ValueError(
            f"module {name!r} ({cls}) cannot be ignored: it is unit {unit.label} of FSDP already. "
            f"It keeps its own unit in any case; leave it out of the ignored ones."
        )
    found: dict[Any, str] = {}
    below = {f"{name}.{n}".strip("."): inner for n, inner in own_modules(item).items()}
    check_free(below, "Ignore it in the wrapper that makes that unit.")
    for path, inner in below.items():
        found[inner] = path
        for attribute, param in inner._parameters.items():
            if param is not None:
                _check_unsharded(param, f"{path}.{attribute}".strip("."))
                found[param] = f"{path}.{attribute}".strip(".")
    return found


def _check_unsharded(param: nn.Parameter, name: str) -> None:
    unit, name_there = unit_of_orig_param(param)
    if unit is None and not is_optimized(param):
        return
    where = f" as {name_there!r} of unit {unit.label}" if unit is not None else ""
    raise ValueError(
        f"parameter {name or name_there or list(param.shape)!r} cannot be ignored: it is sharded "
        f"already{where}, and the unit trains its own copy. Ignore it in the wrapper that makes "
        f"that unit, too, before it is sharded."
    )


def _check_elsewhere(module: nn.Module) -> None:
    """Refuse to shard what a wrapper that is not below ``module`` ignores: its module computes with
    the tensor itself, and this unit would compute with a copy."""
    known = _known(module)
    for path, inner in module.named_modules():
        items: list[tuple[str, Any]] = [(path, inner)]
        items += [(f"{path}.{name}".lstrip("."), p) for name, p in inner._parameters.items()]
        for name, item in items:
            by = ignored_by(item)
            if by is not None and by not in known:
                raise ValueError(
                    f"{clean(name) or '<root>'!r} of {type(module).__name__} is ignored by the "
                    f"wrapper of another module ({type(by).__name__}), so it cannot be sharded "
                    f"here. Ignore it here, too, or in neither of the two."
                )

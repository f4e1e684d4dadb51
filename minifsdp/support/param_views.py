"""What the modules of a unit find in the place of its parameters, before, in and after a forward.

While a unit is unsharded its modules have *views* of the unsharded flat parameter, which
``module.parameters()`` lists. While it is sharded they have placeholders (param_access.py), and the
unit's module has the sharded flat parameter, which an optimizer finds there::

    sharded      linear.weight: placeholder      parameters(): _flat_param [n]
    unsharded    linear.weight: view [3, 2]      parameters(): weight [3, 2], bias [2]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifsdp.support.divided_param import mark
from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit

FLAT_PARAM = "_flat_param"  # the name that torch gives it


OTHER_WEIGHTS = (
    "To compute with other weights, call torch.func.functional_call with a plain module of the "
    "same class (it may be on the meta device, if you give all weights), or without gradients "
    "inside of FSDP.summon_full_params(model)."
)


def check_unreplaced(unit: Unit) -> None:
    """Refuse other weights in the places of a unit's parameters, before it is gathered: a forward
    would put its views over them, and compute with the old ones. torch tells nobody of these:
    ``torch.func.functional_call`` writes to ``module._parameters``.

    Raises:
        RuntimeError: naming the parameter. Everything is as the program has left it.
    """
    own: Sequence[Any] = [None] * len(unit.param_infos)
    if unit.mesh is not None:
        own = unit.optimized_params
    elif unit.module._parameters.get(FLAT_PARAM, unit.sharded_flat_param) is not (
        unit.sharded_flat_param
    ):
        raise _replaced(unit, FLAT_PARAM, unit.module._parameters[FLAT_PARAM])
    for info, listed in zip(unit.param_infos, own, strict=True):
        for module, name in info.owners:
            if module._parameters.get(name) is not listed:
                raise _replaced(unit, info.name, module._parameters.get(name))


def check_unreplaced_by_hand(unit: Unit) -> None:
    """The same where ``FSDPModule.unshard()`` has put whole parameters there.

    Raises:
        RuntimeError: naming the parameter.
    """
    for info in unit.param_infos:
        for module, name in info.owners:
            param = module._parameters.get(name)
            memory = unit.unsharded.storage._cdata
            if param is None or param.untyped_storage()._cdata != memory:
                raise _replaced(unit, info.name, param)


def _replaced(unit: Unit, name: str, found: object) -> RuntimeError:
    there = "None" if found is None else "another tensor"
    return RuntimeError(
        f"in the place of parameter {name!r} of unit {unit.label} there is {there}, which was put "
        f"there by functional_call, or by a program that writes to module._parameters. The unit "
        f"would compute with its own parameter all the same. {OTHER_WEIGHTS} Otherwise change the "
        f"model before you wrap it."
    )


def make_views(unit: Unit) -> None:
    """Make new views of ``unit.unsharded.flat_param`` for a forward, which autograd then records as
    the first operations of that forward.

    They cannot be made once for all: autograd runs operations in the reverse of the order in which
    they were *created*. Views from before would run after the whole backward, no unit's gradient
    would be complete before its end, and all units would be unsharded at once.
    """
    # After an evaluation a reentrant checkpoint may run again in its backward, with the views of
    # that evaluation. Views that were made without gradients would stop the gradient on its way to
    # the unsharded flat parameter.
    with torch.inference_mode(False):  # this switches gradients on, also inside of no_grad
        unit.views = unit.view_maker.make(unit)


def use_unsharded_views(unit: Unit) -> None:
    """Let the modules compute with the views."""
    if len(unit.views) != len(unit.param_infos):
        make_views(unit)  # there are none in this precision: the last forward was in another one
    unit.uses_unsharded_views = True
    unit.module._parameters.pop(FLAT_PARAM, None)  # or parameters() would list its elements twice
    _show(unit, unit.views)


def use_sharded_views(unit: Unit) -> None:
    """Put placeholders where the views are, and let ``parameters()`` list what the optimizer needs:
    the sharded flat parameter or, of a unit in rows, the DTensors. Does nothing if that is so
    already."""
    if unit.uses_unsharded_views:
        unit.uses_unsharded_views = False
        _hide(unit)


def _hide(unit: Unit) -> None:
    unit.has_placeholders = True
    listed = unit.optimized_params if unit.mesh is not None else [None] * len(unit.param_infos)
    for info, placeholder, param in zip(unit.param_infos, unit.placeholders, listed, strict=True):
        info.use_sharded_views(placeholder, param)
    if unit.param_infos and unit.mesh is None:
        unit.module._parameters[FLAT_PARAM] = unit.sharded_flat_param


def hides_params(units: Sequence[Unit]) -> bool:
    """Whether units in rows have placeholders, for a backward that is still to come."""
    return any(unit.mesh is not None and unit.has_placeholders for unit in units)


def hide_divided_params(units: Sequence[Unit]) -> None:
    """Undo :func:`show_divided_params`, for a forward without gradients: in there a module may
    compute with the parameters of one inside of it, and not call that one."""
    for unit in units:
        if unit.mesh is not None and not unit.uses_unsharded_views and not unit.has_placeholders:
            check_unreplaced(unit)
            _hide(unit)


def show_divided_params(units: Sequence[Unit]) -> None:
    """Let the modules of units in rows have their DTensors, in place of placeholders.

    This is for the time between steps. From a forward to the end of its backward the placeholders
    stay: what a checkpoint runs again may need a parameter of a unit that is sharded. A placeholder
    can have it gathered; a DTensor would be computed with.
    """
    for unit in units:
        if unit.mesh is not None and not unit.uses_unsharded_views and unit.has_placeholders:
            _show(unit, unit.optimized_params)


def _show(unit: Unit, tensors: Sequence[Tensor]) -> None:
    hidden, unit.has_placeholders = unit.has_placeholders, False
    for info, tensor in zip(unit.param_infos, tensors, strict=True):
        info.use_unsharded_views(tensor, hidden)


class Values(NamedTuple):
    """By these two a change of the unsharded parameters of a unit is noticed."""

    version: int  # autograd's count of changes that are made through the views
    number: int | None  # a fingerprint: a change through ``weight.data`` is not counted


def values(unit: Unit, thoroughly: bool) -> Values:
    """The values that the unsharded parameters have now.

    Args:
        thoroughly: read all of them, which is for the first steps only.
    """
    # Without sharding the views are the parameters themselves, and a change of them lasts.
    unsharded = unit.unsharded
    number = fingerprint([unsharded.data]) if thoroughly and unsharded.needs_unshard else None
    return Values(unsharded.flat_param._version, number)


def check_untouched(unit: Unit, before: Values, failed: bool = False) -> None:
    """Refuse changes that a module has made to its unsharded parameters, which are about to be
    freed.

    Args:
        before: the values when the forward began.
        failed: the forward has raised an error. Autograd refuses a view that is used after an
            in-place change, also without sharding, and its message has no name of a parameter.

    Raises:
        RuntimeError: a parameter was changed in place, or another tensor put in its place.
    """
    how = ""
    unsharded = unit.unsharded
    if (unsharded.needs_unshard or failed) and values(unit, before.number is not None) != before:
        how = "changed in place"
    memory = unsharded.storage._cdata
    for info, view in zip(unit.param_infos, unit.views, strict=True):
        for module, name in info.owners:
            if module._parameters.get(name) is not view:
                how = f"replaced ({info.name!r})"
        if view.untyped_storage()._cdata != memory:
            how = f"given other data ({info.name!r}.data = ...)"
    if how:
        raise RuntimeError(
            f"a parameter of unit {unit.label} was {how} in the forward of its module. It is a "
            f"view there, of memory that is freed afterwards, so the change would be lost. Change "
            f"parameters between steps, inside of FSDP.summon_full_params(model), or keep what a "
            f"forward changes in a buffer."
        )


def adopt(unit: Unit) -> None:
    """Take over the parameter that ``module.to(...)`` has put in place of the flat parameter, or
    the DTensors that it has changed."""
    own: Any = unit.sharded_flat_param  # in rows a DividedParameter
    if unit.mesh is not None:
        mark(unit, own)
    found = unit.module._parameters.get(FLAT_PARAM)
    if found is None or found is own:
        return
    # torch moves values, or casts them. Others were put there for one call, and will be taken away.
    moved = found.dtype != own.dtype or found.device != own.device or torch.equal(found, own)
    if type(found) is not nn.Parameter or not moved:
        raise _replaced(unit, FLAT_PARAM, found)
    unit.module._parameters[FLAT_PARAM] = unit.replace_shard(found)

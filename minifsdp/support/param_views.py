"""What the modules of a unit see of its parameters, before, in and after their forward.

While a unit is gathered its modules have *views* of the flat tensor in the places of their
parameters, also for those who ask for ``module.parameters()``. While it is sharded they have
placeholders (param_access.py), and the unit's module has the flat parameter, for an optimizer to
find::

    sharded     linear.weight: placeholder         parameters(): _flat_param
    gathered    linear.weight: view [3, 2]      parameters(): weight, bias
"""

from typing import NamedTuple

import torch

from minifsdp.flatten import unflatten
from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit

FLAT_PARAM = "_flat_param"  # as in torch


def make_views(unit: Unit) -> None:
    """New views of ``unit.unsharded.flat_param`` for a forward, which autograd will record as its
    first operations.

    Not once for all: autograd runs operations in the reverse of the order in which they were
    *created*. Old views would come after the whole backward, no unit's gradient would be complete
    before its end, and all units would be unsharded at once.
    """
    # A reentrant checkpoint may run again, in its backward, with views that an evaluation has left.
    # Made without gradients they would keep the gradient that should go on to `full`.
    with torch.inference_mode(False):  # which leaves no_grad as well
        unit.views = unflatten(unit.unsharded.flat_param, [info.shape for info in unit.param_infos])


def use_unsharded_views(unit: Unit) -> None:
    """Let the modules compute with the views."""
    if len(unit.views) != len(unit.param_infos):
        make_views(unit)  # the last forward was in another precision
    hidden, unit.uses_unsharded_views = not unit.uses_unsharded_views, True
    unit.module._parameters.pop(FLAT_PARAM, None)  # or its elements would be listed twice
    for info, view in zip(unit.param_infos, unit.views, strict=True):
        info.use_unsharded_views(view, hidden)


def use_sharded_views(unit: Unit) -> None:
    """Put placeholders where the views were, and show the flat parameter. Twice is no error."""
    if not unit.uses_unsharded_views:
        return
    unit.uses_unsharded_views = False
    for info, placeholder in zip(unit.param_infos, unit.placeholders, strict=True):
        info.use_sharded_views(placeholder)
    if unit.param_infos:
        unit.module._parameters[FLAT_PARAM] = unit.sharded_flat_param


class Values(NamedTuple):
    """What tells whether somebody has changed the gathered parameters of a unit."""

    version: int  # autograd counts the changes that are made through the views
    number: int | None  # of all bits: a change through ``weight.data`` is not counted


def values(unit: Unit, thoroughly: bool) -> Values:
    """Those of now.

    Args:
        thoroughly: read all values, for the first steps.
    """
    # Without sharding the views are the parameters themselves, so that changes last.
    number = fingerprint([unit.unsharded.data]) if thoroughly and unit.needs_unshard else None
    return Values(unit.unsharded.flat_param._version, number)


def check_untouched(unit: Unit, before: Values, failed: bool = False) -> None:
    """Refuse what a module has done to its gathered parameters, which are about to be freed.

    Args:
        before: the values, when the forward began.
        failed: the forward has raised an error. Autograd refuses a view that is used after a change
            in place, without its name, also where nothing is sharded and the change would last.

    Raises:
        RuntimeError: it has changed one in place, or put another tensor in its place.
    """
    how = ""
    if (unit.needs_unshard or failed) and values(unit, before.number is not None) != before:
        how = "changed in place"
    memory = unit.unsharded.storage._cdata
    for info, view in zip(unit.param_infos, unit.views, strict=True):
        for module, attribute in info.owners:
            if module._parameters.get(attribute) is not view:
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
    """Take over what ``module.to(...)`` has put in the shard's place."""
    found = unit.module._parameters.get(FLAT_PARAM)
    if found is not None and found is not unit.sharded_flat_param:
        unit.module._parameters[FLAT_PARAM] = unit.replace_shard(found)

"""What the modules of a unit see of its parameters, before, in and after their forward.

While a unit is gathered its modules have *views* of the flat tensor in the places of their
parameters, also for those who ask for ``module.parameters()``. While it is sharded they have
stand-ins (param_access.py), and the unit's module has the flat parameter, for an optimizer to find::

    sharded     linear.weight: stand-in         parameters(): _flat_param
    gathered    linear.weight: view [3, 2]      parameters(): weight, bias
"""

from typing import NamedTuple

import torch

from minifsdp.checks.same_model import fingerprint
from minifsdp.flatten import unflatten
from minifsdp.unit import Unit

FLAT_PARAM = "_flat_param"  # as in torch


def make_views(unit: Unit) -> None:
    """New views of ``unit.full`` for a forward, which autograd will record as its first operations.

    Not once for all: autograd runs operations in the reverse of the order in which they were
    *created*. Old views would come after the whole backward, no unit's gradient would be complete
    before its end, and all units would be unsharded at once.
    """
    assert unit.full is not None
    # A reentrant checkpoint may run again, in its backward, with views that an evaluation has left.
    # Made without gradients they would keep the gradient that should go on to `full`.
    with torch.inference_mode(False):  # which leaves no_grad as well
        unit.views = unflatten(unit.full, [slot.shape for slot in unit.slots])


def expose(unit: Unit) -> None:
    """Let the modules compute with the views."""
    if len(unit.views) != len(unit.slots):
        make_views(unit)  # the last forward was in another precision
    hidden, unit.exposed = not unit.exposed, True
    unit.module._parameters.pop(FLAT_PARAM, None)  # or its elements would be listed twice
    for slot, view in zip(unit.slots, unit.views, strict=True):
        slot.expose(view, hidden)


def hide(unit: Unit) -> None:
    """Put stand-ins where the views were, and show the flat parameter. Nothing, if that is so."""
    if not unit.exposed:
        return
    unit.exposed = False
    for slot, stand_in in zip(unit.slots, unit.stand_ins, strict=True):
        slot.hide(stand_in)
    if unit.slots:
        unit.module._parameters[FLAT_PARAM] = unit.shard


class Values(NamedTuple):
    """What tells whether somebody has changed the gathered parameters of a unit."""

    version: int  # autograd counts the changes that are made through the views
    number: int | None  # of all bits: a change through ``weight.data`` is not counted


def values(unit: Unit, thoroughly: bool) -> Values:
    """Those of now.

    Args:
        thoroughly: read all values, for the first steps.
    """
    assert unit.full is not None
    # Without sharding the views are the parameters themselves, so that changes last.
    number = fingerprint([unit.buffer]) if thoroughly and unit.transient else None
    return Values(unit.full._version, number)


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
    if (unit.transient or failed) and values(unit, before.number is not None) != before:
        how = "changed in place"
    memory = unit.room.storage._cdata
    for slot, view in zip(unit.slots, unit.views, strict=True):
        for module, attribute in slot.owners:
            if module._parameters.get(attribute) is not view:
                how = f"replaced ({slot.name!r})"
        if view.untyped_storage()._cdata != memory:
            how = f"given other data ({slot.name!r}.data = ...)"
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
    if found is not None and found is not unit.shard:
        unit.module._parameters[FLAT_PARAM] = unit.replace_shard(found)

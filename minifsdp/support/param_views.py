"""What the modules of a unit find in the place of its parameters, before, in and after a forward.

While a unit is unsharded its modules have *views* of the unsharded flat parameter, which
``module.parameters()`` lists. While it is sharded they have placeholders (param_access.py), and the
unit's module has the sharded flat parameter, which an optimizer finds there::

    sharded      linear.weight: placeholder      parameters(): _flat_param [n]
    unsharded    linear.weight: view [3, 2]      parameters(): weight [3, 2], bias [2]
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minifsdp.unit import Unit

FLAT_PARAM = "_flat_param"  # the name that torch gives it
OTHER_WEIGHTS = (
    "To compute with other weights, call torch.func.functional_call with a plain module of the "
    "same class (it may be on the meta device, if you give all weights), or without gradients "
    "inside of FSDP.summon_full_params(model)."
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
    show(unit, unit.views)


def use_sharded_views(unit: Unit) -> None:
    """Put placeholders where the views are, and let ``parameters()`` list what the optimizer needs:
    the sharded flat parameter or, of a unit in rows, the DTensors. Does nothing if that is so
    already."""
    if unit.uses_unsharded_views:
        unit.uses_unsharded_views = False
        hide(unit)


def hide(unit: Unit) -> None:
    """Put placeholders in the place of views or of DTensors."""
    unit.has_placeholders = True
    listed = unit.optimized_params if unit.mesh is not None else [None] * len(unit.param_infos)
    for info, placeholder, param in zip(unit.param_infos, unit.placeholders, listed, strict=True):
        info.use_sharded_views(placeholder, param)
    if unit.param_infos and unit.mesh is None:
        unit.module._parameters[FLAT_PARAM] = unit.sharded_flat_param


def show(unit: Unit, tensors: Sequence[Tensor]) -> None:
    """Put these in the place of the parameters, one for each of them."""
    hidden, unit.has_placeholders = unit.has_placeholders, False
    for info, tensor in zip(unit.param_infos, tensors, strict=True):
        info.use_unsharded_views(tensor, hidden)


def replaced(unit: Unit, name: str, found: object) -> RuntimeError:
    """The error for ``found``, which is in the place of the parameter of this name."""
    there = "None" if found is None else "another tensor"
    return RuntimeError(
        f"in the place of parameter {name!r} of unit {unit.label} there is {there}, which was put "
        f"there by functional_call, or by a program that writes to module._parameters. The unit "
        f"would compute with its own parameter all the same. {OTHER_WEIGHTS} Otherwise change the "
        f"model before you wrap it."
    )

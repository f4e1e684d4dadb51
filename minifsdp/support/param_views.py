"""What the modules of a unit find in the place of its parameters, before, in and after a forward.

While a unit is unsharded its modules have *views* of the unsharded flat parameter, which
``module.parameters()`` lists. While it is sharded they have placeholders (param_access.py), and the
unit's module has the sharded flat parameter, which an optimizer finds there::

    sharded      linear.weight: placeholder      parameters(): _flat_param [n]
    unsharded    linear.weight: view [3, 2]      parameters(): weight [3, 2], bias [2]
"""

from collections.abc import Sequence

from torch import Tensor

from minifsdp.core.views import FLAT_PARAM
from minifsdp.featured_unit import FeaturedUnit

OTHER_WEIGHTS = (
    "To compute with other weights, call torch.func.functional_call with a plain module of the "
    "same class (it may be on the meta device, if you give all weights), or without gradients "
    "inside of FSDP.summon_full_params(model)."
)


class Placeholders:
    """The :class:`~minifsdp.core.views.Places` of a unit whose modules have placeholders while it
    is sharded."""

    def show(self, unit: FeaturedUnit, tensors: Sequence[Tensor]) -> None:
        """See :class:`~minifsdp.core.views.Places`.

        Raises:
            RuntimeError: a placeholder was replaced by another parameter.
        """
        # Or parameters() would list its elements twice.
        unit.module._parameters.pop(FLAT_PARAM, None)
        hidden, unit.has_placeholders = unit.has_placeholders, False
        for info, tensor in zip(unit.param_infos, tensors, strict=True):
            info.show(tensor, hidden)

    def hide(self, unit: FeaturedUnit) -> None:
        """See :class:`~minifsdp.core.views.Places`."""
        unit.has_placeholders = True
        listed = unit.optimized_params if unit.mesh is not None else [None] * len(unit.param_infos)
        for info, placeholder, param in zip(
            unit.param_infos, unit.placeholders, listed, strict=True
        ):
            info.hide(placeholder, param)
        if unit.param_infos and unit.mesh is None:
            unit.module._parameters[FLAT_PARAM] = unit.sharded_flat_param


def replaced(unit: FeaturedUnit, name: str, found: object) -> RuntimeError:
    """The error for ``found``, which is in the place of the parameter of this name."""
    there = "None" if found is None else "another tensor"
    return RuntimeError(
        f"in the place of parameter {name!r} of unit {unit.label} there is {there}, which was put "
        f"there by functional_call, or by a program that writes to module._parameters. The unit "
        f"would compute with its own parameter all the same. {OTHER_WEIGHTS} Otherwise change the "
        f"model before you wrap it."
    )

"""Other weights in the places of a unit's parameters."""

from collections.abc import Sequence
from typing import Any

from minifsdp.layers import Call, Layer
from minifsdp.support.param_views import FLAT_PARAM
from minifsdp.unit import Unit

OTHER_WEIGHTS = (
    "To compute with other weights, call torch.func.functional_call with a plain module of the "
    "same class (it may be on the meta device, if you give all weights), or without gradients "
    "inside of FSDP.summon_full_params(model)."
)


class Unreplaced(Layer):
    """Refuses a forward of a unit whose parameters were replaced."""

    def before_forward(self, call: Call) -> None:
        """See :func:`check_unreplaced`. Gathered units have views there, which are looked at when
        the forward is over (untouched.py)."""
        if not call.unit.uses_unsharded_views:
            check_unreplaced(call.unit)


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
        raise replaced(unit, FLAT_PARAM, unit.module._parameters[FLAT_PARAM])
    for info, listed in zip(unit.param_infos, own, strict=True):
        for module, name in info.owners:
            if module._parameters.get(name) is not listed:
                raise replaced(unit, info.name, module._parameters.get(name))


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
                raise replaced(unit, info.name, param)


def replaced(unit: Unit, name: str, found: object) -> RuntimeError:
    """The error for ``found``, which is in the place of the parameter of this name."""
    there = "None" if found is None else "another tensor"
    return RuntimeError(
        f"in the place of parameter {name!r} of unit {unit.label} there is {there}, which was put "
        f"there by functional_call, or by a program that writes to module._parameters. The unit "
        f"would compute with its own parameter all the same. {OTHER_WEIGHTS} Otherwise change the "
        f"model before you wrap it."
    )

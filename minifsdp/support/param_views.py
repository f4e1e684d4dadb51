"""What the modules of a unit find in place of its parameters, before, in and after a forward.

While a unit is unsharded its modules have *views* of the unsharded flat parameter, which
``module.parameters()`` lists. While it is sharded they have placeholders (param_access.py), and the
unit's module has the sharded flat parameter, which an optimizer finds there::

    sharded      linear.weight: placeholder      parameters(): _flat_param [n]
    unsharded    linear.weight: view [3, 2]      parameters(): weight [3, 2], bias [2]
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn

from minifsdp.core.views import FLAT_PARAM, make_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.param_access import ParamInfo

OTHER_WEIGHTS = (
    "To compute with other weights, call torch.func.functional_call with a plain module of the "
    "same class (it may be on the meta device, if you give all weights), or without gradients "
    "inside of FSDP.summon_full_params(model)."
)


class Placeholders:
    """The ``places`` of a unit whose modules have placeholders while it is sharded. The methods are
    those of :class:`~minifsdp.core.views.InModules`.

    Args:
        param_infos: of the unit.
    """

    def __init__(self, param_infos: Sequence[ParamInfo]) -> None:
        for module in {module for info in param_infos for module, _ in info.owners}:
            if isinstance(module, nn.RNNBase):
                # On a GPU this method copies new weights to memory of its own, which nobody frees,
                # and makes them point there. The views of each forward are new weights.
                module.flatten_parameters = _leave_them  # type: ignore[method-assign]

    def show(self, unit: FeaturedUnit, tensors: Sequence[Tensor]) -> None:
        """See :class:`~minifsdp.core.views.InModules`.

        Args:
            unit: gathered; or in rows, between steps.
            tensors: its views, of which new ones are made if they were dropped; or the DTensors
                that an optimizer is to find.

        Raises:
            RuntimeError: a placeholder was replaced by another parameter.
        """
        # Otherwise parameters() would list its elements twice.
        unit.module._parameters.pop(FLAT_PARAM, None)
        hidden, unit.has_placeholders = unit.has_placeholders, False
        if not tensors and unit.param_infos:  # somebody has kept their memory, or it is another one
            make_views(unit)
            tensors = unit.views
        if unit.leaks and unit.kept_views and unit.shows_views:  # not so between steps
            tensors = _kept(unit.kept_views, tensors)
        for info, tensor in zip(unit.param_infos, tensors, strict=True):
            for module, name in info.owners:
                attributes = module.__dict__
                found = name in attributes
                if found:
                    del attributes[name]  # Python would find it before the parameter
                if type(module).__setattr__ is not _SETATTR:
                    _assign(module, name, tensor)
                    attributes.pop(name, None)
                if hidden and not found:
                    raise RuntimeError(
                        f"parameter {info.name!r} was replaced after wrapping. Its unit was made "
                        f"of the old one, and trains that; the new one would be trained by nobody. "
                        f"Replace it before you wrap the model, or set its values inside of "
                        f"FSDP.summon_full_params(model)."
                    )
                module._parameters[name] = tensor

    def hide(self, unit: FeaturedUnit) -> None:
        """See :class:`~minifsdp.core.views.InModules`."""
        unit.has_placeholders = True
        listed = unit.optimized_params if unit.mesh is not None else [None] * len(unit.param_infos)
        for info, placeholder, param in zip(
            unit.param_infos, unit.placeholders, listed, strict=True
        ):
            for module, name in info.owners:
                if type(module).__setattr__ is not _SETATTR:
                    _assign(module, name, placeholder)
                # The name stays, also with None: so it keeps its place among the parameters, and
                # torch refuses to assign what is not a parameter to it.
                module._parameters[name] = param
                module.__dict__[name] = placeholder
        if unit.param_infos and unit.mesh is None:
            unit.module._parameters[FLAT_PARAM] = unit.sharded_flat_param


def _kept(refs: Sequence[ref[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors``; where somebody has kept a view of a forward, that view in place of the new one.

    An autograd.Function that checkpoints activations keeps the views, and asks torch.autograd.grad
    for their gradients. What it runs again in the backward has to compute with the same tensors, or
    they get no gradients.
    """
    kept: list[Any] = [old() for old in refs]
    for old in kept:
        if old is not None:
            old._fix_weakref()  # as torch asks for, or autograd may drop it meanwhile
    return [new if old is None else old for new, old in zip(tensors, kept, strict=True)]


_SETATTR: Any = nn.Module.__setattr__


def _leave_them() -> None:
    """In place of ``RNNBase.flatten_parameters``. cuDNN then copies the weights in each call."""


def _assign(module: nn.Module, name: str, value: object) -> None:
    """Assign as users do, for modules with a ``__setattr__`` of their own: there an RNN updates the
    list of weights that it computes with."""
    module._parameters.pop(name, None)  # or torch would refuse a value that is no nn.Parameter
    setattr(module, name, value)


def replaced(unit: FeaturedUnit, name: str, found: object) -> RuntimeError:
    """The error for ``found``, which is in the place of the parameter of this name."""
    there = "None" if found is None else "another tensor"
    return RuntimeError(
        f"in the place of parameter {name!r} of unit {unit.label} there is {there}, which was put "
        f"there by functional_call, or by a program that writes to module._parameters. The unit "
        f"would compute with its own parameter all the same. To set its values, use "
        f"load_state_dict(). {OTHER_WEIGHTS} Otherwise change the model before you wrap it."
    )

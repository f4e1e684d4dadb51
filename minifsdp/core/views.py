"""Views: what the layers compute with, and how its gradients become one gradient of the unit.

In each forward a unit has a new *view* of its unsharded flat parameter for each parameter::

    unsharded flat parameter   [10]     a a a a a a b c c c
    views                               weight [2, 3]: a    scale []: b    bias [3]: c

A backward leads the gradients of the views back into what was split: autograd copies them together
to one flat gradient, ``flat_param.grad``, as a reduction needs it. What has no gradient is zero.

How this is done is a strategy of the unit, its ``view_maker``. Another one, its ``places``, says
what its modules find where they had a parameter: a view while the unit is unsharded, and something
else while it is sharded. Whoever makes a unit chooses both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .unit import Unit

FLAT_PARAM = "_flat_param"  # the name that torch gives to what the optimizer sees


def make_views(unit: Unit) -> None:
    """Make new views of ``unit.unsharded.flat_param`` for a forward, which autograd then records as
    the first operations of that forward.

    They cannot be made once for all: autograd runs operations in the reverse of the order in which
    they were *created*. Views from before would run after the whole backward, no unit's gradient
    would be complete before its end, and all units would be unsharded at once.
    """
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():  # as a rule
        unit.views = unit.view_maker.make(unit)
        return
    # After an evaluation a reentrant checkpoint may run again in its backward, with the views of
    # that evaluation. Views that were made without gradients would stop the gradient on its way to
    # the unsharded flat parameter.
    with torch.inference_mode(False):  # this switches gradients on, also inside of no_grad
        unit.views = unit.view_maker.make(unit)


def show_views(unit: Unit) -> None:
    """Let the modules compute with the views."""
    unit.shows_views = True
    unit.places.show(unit, unit.views)


def hide_views(unit: Unit) -> None:
    """Take the views away from the modules. Does nothing if that is so already."""
    if unit.shows_views:
        unit.places.hide(unit)
        unit.shows_views = False


class InModules:
    """The views are attributes of the modules, and none of their parameters:
    ``module.parameters()`` lists the sharded flat parameter at any time. Other ``places`` have the
    same methods.

    Args:
        param_infos: of the unit.
    """

    def __init__(self, param_infos: Sequence[Any]) -> None:
        # Not setattr(): torch would ask four times what it is that is set.
        self._attributes = [
            (module.__dict__, name, at)
            for at, info in enumerate(param_infos)
            for module, name in info.owners
        ]

    def show(self, unit: Any, tensors: Sequence[Tensor]) -> None:
        """Put these there, one for each parameter."""
        for attributes, name, at in self._attributes:
            attributes[name] = tensors[at]

    def hide(self, unit: Any) -> None:
        """Put there what is there while the unit is sharded."""
        for attributes, name, _ in self._attributes:
            attributes[name] = _SHARDED


class ShardedParameter:
    """Stands where a parameter was while its unit is sharded, so that no layer computes with it.
    Its values are there while the unit's module runs, and in the unit's backward."""


_SHARDED = ShardedParameter()


class SplitViews:
    """The views of a unit, whose gradients autograd copies together. A hook on the unsharded flat
    parameter is called when a backward has gone through every use of them (unit.py). Another
    ``view_maker`` has the same methods."""

    def make(self, unit: Any) -> list[Tensor]:
        """A view of ``unit.unsharded`` for each parameter, in the parameter's shape, recorded by
        autograd if gradients are on."""
        views: list[Tensor] = unit.layout.unflatten(unit.unsharded.flat_param)
        return views

    def has_gradient(self, unit: Any) -> bool:
        """Whether a backward has computed some of the gradient, and nobody has taken it yet."""
        return unit.unsharded.flat_param.grad is not None

    def take_gradient(self, unit: Any) -> Any:
        """What has arrived of the gradient, laid out as ``unit.unsharded.flat_param`` is and of its
        dtype. What has not, and the padding, is zero. Afterwards nothing has arrived.

        Returns:
            A tensor ``[trained_numel]``; of another view maker it may be what ``unit.comm`` reduces
            in place of one.
        """
        flat_param = unit.unsharded.flat_param
        grad, flat_param.grad = flat_param.grad, None
        return grad

    def drop_gradient(self, unit: Any) -> None:
        """Forget what a backward has computed of the gradient."""
        unit.unsharded.flat_param.grad = None

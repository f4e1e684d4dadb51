"""Between steps a program may have the parameters of some units out (between_steps/full_params.py):
to look at them, to change them, to save them. It may not train with them meanwhile.
"""

from collections.abc import Iterable, Sequence

import torch

from minifsdp.hooks import Hooks
from minifsdp.layers import Layer
from minifsdp.unit import Unit


class Summoned(Layer):
    """Refuses a forward with gradients, and a backward, while parameters are out."""

    def __init__(self, hooks: Hooks) -> None:
        self._units, self._summoned = hooks.engine.units, hooks.summoned

    def between_steps(self, unit: Unit | None) -> None:
        """Raises RuntimeError: see :func:`check_summoned` and :func:`check_backward_outside`."""
        if unit is not None:
            if self._summoned:
                check_summoned(unit, self._units, any(self._summoned.values()))
            return
        for one in [*self._summoned]:
            one.end_by_hand()  # it is gathered once more, by its own turn
        check_backward_outside(self._summoned)


def check_summoned(unit: Unit, units: Sequence[Unit], as_dtensors: bool) -> None:
    """Refuse to train inside of summon_full_params, and to compute inside of as_dtensors.

    Args:
        unit: the one that was called.
        units: all of its root.
        as_dtensors: whether DTensors are in the place of parameters.

    Raises:
        RuntimeError: they are; or some units are trained, and gradients are on.
    """
    if as_dtensors:
        raise RuntimeError(
            f"unit {unit.label} was called inside as_dtensors, which shows parameters in the form "
            f"of checkpoints. Leave the block first."
        )
    trained = any(one.sharded_flat_param.requires_grad for one in units)
    if trained and torch.is_grad_enabled():
        raise RuntimeError(
            f"unit {unit.label} was called inside summon_full_params with gradients enabled. They "
            f"would reach parameters that are there for the time of the block only. Leave the "
            f"block first, since forward gathers by itself; or use torch.no_grad()."
        )


def check_backward_outside(summoned: Iterable[Unit]) -> None:
    """Raises RuntimeError: a backward begins where the parameters of units are out."""
    if labels := ", ".join(unit.label for unit in summoned):
        raise RuntimeError(
            f"backward() was called inside summon_full_params or as_dtensors, which have taken out "
            f"the parameters of {labels}. A backward gathers them itself, and frees them. Leave "
            f"the block first."
        )

"""Errors that torch raises in a forward without a word of the reason, said again with it."""

from collections.abc import Sequence

from minifsdp.layers import Call, Layer
from minifsdp.unit import Unit


class RefusedOperations(Layer):
    """Names the unit and the way out where torch refuses an operation because of sharding.

    Args:
        units: of the root.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def error(self, call: Call, error: RuntimeError) -> None:
        """Raises RuntimeError: ``error`` is one of those that are known here."""
        refuse_transforms(call.unit, error)
        refuse_mixed(call.unit, self._units, error)


def refuse_transforms(unit: Unit, error: RuntimeError) -> None:
    """Name the unit and the way out where torch refuses a transform of torch.func: there are none
    while saved-tensor hooks are set.

    Args:
        error: raised in the unit's forward.

    Raises:
        RuntimeError: ``error`` is that refusal.
    """
    if "saved tensor hooks" in str(error):
        raise RuntimeError(
            f"a transform of torch.func was called in the forward of unit {unit.label}. torch has "
            f"none of them where saved-tensor hooks are set, which is so in a sharded model and in "
            f"an activation checkpoint. Use torch.autograd.grad there, which works."
        ) from error


def refuse_mixed(unit: Unit, units: Sequence[Unit], error: RuntimeError) -> None:
    """Name the units where torch refuses an operation that got a DTensor: between a step and the
    next forward of its unit, a parameter in rows is one.

    Args:
        unit: in whose forward ``error`` was raised.
        units: all of its root.

    Raises:
        RuntimeError: ``error`` is that refusal.
    """
    if "got mixed torch.Tensor and DTensor" in str(error):
        inside = [u.label for u in units if unit in u.ancestors and not u.uses_unsharded_views]
        raise RuntimeError(
            f"an operation in the forward of unit {unit.label} got a parameter that is sharded now "
            f"(torch says: {str(error).split(',')[0]}). The parameters of the units inside of it "
            f"({', '.join(inside)}) are there while the module of that unit is called. If the "
            f"module around one computes with them itself, as nn.MultiheadAttention does with its "
            f"out_proj, let both be one unit."
        ) from error

"""A forward does not change its parameters."""

from typing import NamedTuple

from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.layers import Call, Layer
from minifsdp.support.fingerprint import fingerprint
from minifsdp.unit import Unit


class Untouched(Layer):
    """Refuses changes that a forward makes to its unsharded parameters, which would be lost.

    Args:
        agreement: knows whether these are the first steps, in which all values are read.
    """

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement

    def gathered(self, call: Call) -> None:
        """Note the values."""
        call.notes["values"] = values(call.unit, self._agreement.compares(call.unit))

    def error(self, call: Call, error: RuntimeError) -> None:
        """The error may come from such a change. Raises RuntimeError: there is one."""
        if call.unit.uses_unsharded_views:
            check_untouched(call.unit, call.notes["values"], failed=True)

    def after_forward(self, call: Call, output: object) -> object:
        """Raises RuntimeError: see :func:`check_untouched`."""
        check_untouched(call.unit, call.notes["values"])
        return output


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

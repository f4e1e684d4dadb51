"""What a program must not do to a unit's parameters, around a forward and its backward.

A module has its own parameters only between steps. In a forward it computes with views of memory
that comes and goes, and what is done to them is lost::

    before a forward          other weights are in the place of a parameter     Unreplaced
    in a forward              a parameter is changed, or replaced               Untouched
    forward to backward       a shard is changed, by an optimizer for example   Unchanged

In plain PyTorch autograd refuses the last one. Here autograd saves only where to find a parameter
(support/saved_tensors.py), so this file compares the shard's own count of changes.
"""

from collections.abc import Sequence
from typing import Any

from minifsdp.checks.rank_agreement import CHECKED_STEPS, RankAgreement
from minifsdp.core.layers import Call, Layer
from minifsdp.core.views import FLAT_PARAM
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.dtensors import local_of
from minifsdp.support.fingerprint import fingerprint
from minifsdp.support.param_views import replaced


class Unreplaced(Layer):
    """Refuses a forward of a unit whose parameters were replaced."""

    def before_forward(self, call: Call) -> None:
        """See :func:`check_unreplaced`. Gathered units have views there, which are looked at when
        the forward is over (:class:`Untouched`)."""
        if not call.unit.shows_views:
            check_unreplaced(call.unit)


def check_unreplaced(unit: FeaturedUnit) -> None:
    """Refuse other weights in the places of a unit's parameters, before the unit is gathered: a
    forward would put its views over them, and compute with the old ones. torch calls no hook for
    them: ``torch.func.functional_call`` writes to ``module._parameters``.

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


def check_unreplaced_by_hand(unit: FeaturedUnit) -> None:
    """The same where ``FSDPModule.unshard()`` has put whole parameters there.

    Raises:
        RuntimeError: naming the parameter.
    """
    for info in unit.param_infos:
        for module, name in info.owners:
            param = module._parameters.get(name)
            memory = unit.unsharded.storage._cdata
            if param is None or local_of(param).untyped_storage()._cdata != memory:
                raise replaced(unit, info.name, param)


class Untouched(Layer):
    """Refuses changes that a forward makes to its unsharded parameters, which would be lost.

    Args:
        agreement: knows whether these are the first steps, in which all values are read.
    """

    def __init__(self, agreement: RankAgreement) -> None:
        self._agreement = agreement

    def gathered(self, call: Call) -> None:
        """Note the values."""
        agreement = self._agreement
        thoroughly = agreement.steps <= CHECKED_STEPS and agreement.compares(call.unit)
        call.notes["values"] = values(call.unit, thoroughly)

    def error(self, call: Call, error: RuntimeError) -> None:
        """The error may come from such a change. Raises RuntimeError: there is one."""
        if call.unit.shows_views:
            check_untouched(call.unit, call.notes["values"], failed=True)

    def after_forward(self, call: Call, output: object) -> object:
        """Raises RuntimeError: see :func:`check_untouched`."""
        check_untouched(call.unit, call.notes["values"])
        return output


Values = tuple[int, int | None]
"""Two numbers that show a change of a unit's unsharded parameters: autograd's count of changes
through the views; and a fingerprint, since changes through ``weight.data`` are not counted."""


def values(unit: FeaturedUnit, thoroughly: bool) -> Values:
    """The values that the unsharded parameters have now.

    Args:
        thoroughly: read all of them, which is for the first steps only.
    """
    # Without sharding the views are the parameters themselves, and a change of them lasts.
    unsharded = unit.unsharded
    number = fingerprint([unsharded.data]) if thoroughly and unsharded.needs_unshard else None
    return unsharded.flat_param._version, number


def check_untouched(unit: FeaturedUnit, before: Values, failed: bool = False) -> None:
    """Refuse changes that a module has made to its unsharded parameters, which are about to be
    freed.

    Args:
        before: the values when the forward began.
        failed: the forward has raised an error. Autograd refuses a view that is used after an
            in-place change, also without sharding, and its message does not name the parameter.

    Raises:
        RuntimeError: a parameter was changed in place, or another tensor put in its place.
    """
    how = ""
    unsharded = unit.unsharded
    if (unsharded.needs_unshard or failed) and values(unit, before[1] is not None) != before:
        how = "changed in place"
    memory = unsharded.storage._cdata
    for info, view in zip(unit.param_infos, unit.views, strict=True):
        for module, name in info.owners:
            if module._parameters.get(name) is not view:
                how = f"replaced ({info.name!r})"
        if local_of(view).untyped_storage()._cdata != memory:
            how = f"given other data ({info.name!r}.data = ...)"
    if how:
        raise RuntimeError(
            f"a parameter of unit {unit.label} was {how} in the forward of its module. It is a "
            f"view there, of memory that is freed afterwards, so the change would be lost. Change "
            f"parameters between steps, inside of FSDP.summon_full_params(model), or keep what a "
            f"forward changes in a buffer."
        )


class Unchanged(Layer):
    """Refuses a backward whose parameters are not those of its forward."""

    def __init__(self) -> None:
        # By unit, the version of its shard in the forward whose backward has begun.
        self._began: dict[FeaturedUnit, int] = {}

    def gathered(self, call: Call) -> None:
        """Note the version that the forward computes with."""
        call.notes["version"] = call.unit.sharded_flat_param._version

    def before_backward(self, call: Call) -> None:
        """See :func:`check_unchanged`."""
        version = self._began[call.unit] = call.notes["version"]
        check_unchanged(call.unit, version)

    def again(self, call: Call) -> None:
        """See :func:`check_one_step`."""
        check_one_step(call.unit, call.notes["version"], self._began[call.unit])


def check_unchanged(unit: FeaturedUnit, version: int) -> None:
    """Raises RuntimeError: the shard has another version than it had in the forward, so there was a
    step between a forward and its backward."""
    if unit.sharded_flat_param._version != version:
        raise RuntimeError(
            f"the parameters of unit {unit.label} were changed in place (by an optimizer?) between "
            f"a forward and its backward, so its gradients would be wrong. Call backward() for "
            f"every forward before you step."
        )


def check_one_step(unit: FeaturedUnit, version: int, first: int) -> None:
    """Refuse a backward through graphs from before and after a step: it would compute the gradients
    of both with the parameters that are gathered for one of them.

    Args:
        version: of the shard, in the forward whose graph the backward has come to.
        first: the same, in the forward of this unit whose graph it came to first.

    Raises:
        RuntimeError: the two differ.
    """
    if version != first:
        raise RuntimeError(
            f"one backward goes through two forwards of unit {unit.label}, and between them its "
            f"parameters were changed in place (by an optimizer?). The values that the first one "
            f"has computed with are gone, so its gradients would be wrong. Call backward() for "
            f"every forward before you step."
        )

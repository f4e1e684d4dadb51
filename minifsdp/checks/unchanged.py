"""Between a forward and its backward, nobody has changed the parameters.

A backward computes with the parameters that it gathers, and these have to be those of its forward.
autograd would notice a change of what it has saved; but what it has saved of a unit is where to
find it (support/saved_tensors.py), and the shard's own count of changes is looked at here.
"""

from minifsdp.layers import Call, Layer
from minifsdp.unit import Unit


class Unchanged(Layer):
    """Refuses a backward whose parameters are not those of its forward."""

    def __init__(self) -> None:
        self._began: dict[Unit, int] = {}  # version of the shard in the forward that began it

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


def check_unchanged(unit: Unit, version: int) -> None:
    """Raises RuntimeError: the shard has another version than it had in the forward, so there was a
    step between a forward and its backward."""
    if unit.sharded_flat_param._version != version:
        raise RuntimeError(
            f"the parameters of unit {unit.label} were changed in place (by an optimizer?) between "
            f"a forward and its backward, so its gradients would be wrong. Call backward() for "
            f"every forward before you step."
        )


def check_one_step(unit: Unit, version: int, first: int) -> None:
    """Refuse a backward through graphs from before and after a step: it would compute the gradients
    of both with the parameters that are gathered for one of them.

    Args:
        version: of the shard, in the forward whose graph the backward has come to.
        first: in the forward of this unit whose graph it came to first.

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

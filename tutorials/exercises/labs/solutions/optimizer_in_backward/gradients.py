"""Each gradient goes to the optimizer as soon as the reduction after it has started."""

from torch import Tensor

from minifsdp.core.gradients import Gradients as Default
from minifsdp.core.reduce import Reduction, store_gradient
from minifsdp.core.unit import Unit
from minifsdp.support.grad_hooks import after_gradient


class Gradients(Default):
    """One gradient is being reduced, and none waits for the end of the backward. The price: after a
    backward that fails, some units have been stepped, and some have not."""

    def take(self, unit: Unit, grad: Tensor) -> None:
        """Start a reduction. It waits for the one before, which is complete then."""
        super().take(unit, grad)
        self._hand_over([one for one in self._reductions if one not in self._under_way])

    def finish(self) -> list[Reduction]:
        """Hand over the last one. Returns none: all hooks have been called."""
        while self._under_way:
            self._advance()
        self._hand_over(self._reductions)
        return []

    def _hand_over(self, complete: list[Reduction]) -> None:
        self._reductions = [one for one in self._reductions if one not in complete]
        for reduction in complete:
            reduction.wait_for_result()
            store_gradient(reduction)
            reduction.unit.unreduced_grad = None  # what no_sync has left was part of this sum
        units = [reduction.unit for reduction in complete]
        complete.clear()
        for unit in units:
            after_gradient(unit)

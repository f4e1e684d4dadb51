"""Each gradient goes to the optimizer as soon as the reduction after it has started."""

from torch import Tensor

from minifsdp.gradients import Gradients as Default
from minifsdp.reduce import start_next_part, store_gradient, wait_for_first_part, wait_for_reduction
from minifsdp.support.grad_hooks import after_gradient
from minifsdp.unit import Unit


class Gradients(Default):
    """One gradient is being reduced, and none waits for the end of the backward. The price: after a
    backward that fails, some units have been stepped, and some have not."""

    def _reduce(self, unit: Unit, grad: Tensor) -> None:
        """Start a reduction. It waits for the one before, which is complete then."""
        before = list(self._reductions)
        super()._reduce(unit, grad)
        if all(reduction.parts_left == 0 for reduction in before):
            self._hand_over(len(before))

    def finish(self) -> None:
        """Hand over the last one."""
        if self._reductions:
            wait_for_first_part(self._reductions[-1], self.streams)
        for reduction in self._reductions:
            start_next_part(reduction, self.streams)
        self._hand_over(len(self._reductions))
        super().finish()  # what is held, and not reduced

    def _hand_over(self, number: int) -> None:
        complete, self._reductions = self._reductions[:number], self._reductions[number:]
        for reduction in complete:
            wait_for_reduction(reduction)
            store_gradient(reduction)
        units = [reduction.unit for reduction in complete]
        complete.clear()
        for unit in units:
            after_gradient(unit)

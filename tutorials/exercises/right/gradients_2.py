"""Waits and stores in the opposite order, and what is held first; hooks in order, at the end."""


class Gradients(Gradients):
    def finish(self) -> None:
        """One reduction after the other is brought to its end; then all are stored."""
        done, held = list(self._reductions), list(self._held.items())
        going = done
        while going:
            going = [reduction for reduction in going if reduction.advance()]
        for reduction in reversed(done):
            reduction.wait_for_result()
        self._reductions, self._under_way, self._held = [], [], {}
        for unit, grad in held:
            store_unreduced(unit, grad)
        for reduction in reversed(done):
            store_gradient(reduction)
        for reduction in done:
            after_gradient(reduction.unit)

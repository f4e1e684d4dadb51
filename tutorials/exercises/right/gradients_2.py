"""Waits and stores in the opposite order, and what is held first; hooks in order, at the end."""


class Gradients(Gradients):
    def finish(self) -> None:
        """One reduction after the other is brought to its end; then all are stored."""
        done, held = list(self._reductions), list(self._held.items())
        for reduction in done[-1:]:
            wait_for_first_part(reduction, self.streams)
        for reduction in done:
            start_next_part(reduction, self.streams)
        for reduction in reversed(done):
            wait_for_reduction(reduction)
        self._reductions, self._held = [], {}
        for unit, grad in held:
            store_unreduced(unit, grad)
        for reduction in reversed(done):
            store_gradient(reduction)
        for reduction in done:
            after_gradient(reduction.unit)

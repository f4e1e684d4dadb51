"""Waits and stores in the opposite order; the list is emptied before anything is stored."""


class Gradients(Gradients):
    def finish(self) -> list[Reduction]:
        """One reduction after the other is brought to its end; then all are stored."""
        done = list(self._reductions)
        going = done
        while going:
            going = [reduction for reduction in going if reduction.advance()]
        for reduction in reversed(done):
            reduction.wait_for_result()
        self._reductions, self._under_way = [], []
        for reduction in reversed(done):
            store_gradient(reduction)
        return done

"""The first order is built by a loop; the root is recorded like every other unit."""


class Prefetcher(Prefetcher):
    def start_backward(self) -> None:
        """A backward begins."""
        self.ahead = None
        self.pre_backward_order.start()
        if len(self.pre_backward_order.last) == 0:
            for unit in self.post_forward_order.current:
                self.pre_backward_order.last.insert(0, unit)

    def pre_backward(self, unit: Unit) -> Unit | None:
        """The backward of ``unit`` begins. Returns the target of BACKWARD_PRE."""
        if not unit.numel:
            return None
        if unit.ancestors:
            self.pre_backward_order.visit(unit)
        return self.target(BackwardPrefetch.BACKWARD_PRE)

    def target(self, setting: BackwardPrefetch) -> Unit | None:
        return self.pre_backward_order.upcoming() if self.backward == setting else None

    def post_backward(self, unit: Unit) -> Unit | None:
        """The backward of ``unit`` has ended. Returns the target of BACKWARD_POST."""
        # The unit after the one whose backward began last, which may be another one than ``unit``:
        # the backward of an outer unit ends after those of its inner units have begun.
        return self.target(BackwardPrefetch.BACKWARD_POST)

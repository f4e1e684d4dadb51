"""The root is recorded like every other unit; both settings in one helper method."""


class Prefetcher(Prefetcher):
    def start_forward(self) -> None:
        """The forward of the root begins."""
        for order in (self.post_forward_order, self.pre_forward_order):
            order.start()

    def pre_forward(self, unit: Unit) -> Unit | None:
        """The forward of ``unit`` begins. Returns the target of FORWARD_PRE."""
        return self.record(self.pre_forward_order, unit, ForwardPrefetch.FORWARD_PRE)

    def record(self, order: "Order", unit: Unit, setting: ForwardPrefetch) -> Unit | None:
        following = order.visit(unit)
        if self.forward != setting or unit.numel == 0:
            return None
        return following

    def post_forward(self, unit: Unit) -> Unit | None:
        """The forward of ``unit`` has ended. Returns the target of FORWARD_POST."""
        return self.record(self.post_forward_order, unit, ForwardPrefetch.FORWARD_POST)

"""Two units ahead: both moments of a unit's backward gather one, if it is among the next two."""

from minifsdp.core.prefetch import Prefetcher as Default
from minifsdp.core.unit import Unit
from minifsdp.core.unit_state import ShardedState


class Prefetcher(Default):
    """The default gathers the next unit before this one computes. This one also gathers when a
    unit is done, before its reduction, which would otherwise be in the way."""

    def pre_backward(self, unit: Unit) -> Unit | None:
        """The first of the next two units that is not gathered yet."""
        chosen = super().pre_backward(unit)
        return self._first_sharded(chosen)

    def post_backward(self, unit: Unit) -> Unit | None:
        """The same, when the backward of ``unit`` is over."""
        return self._first_sharded(self.pre_backward_order.upcoming())

    def _first_sharded(self, following: Unit | None) -> Unit | None:
        if following is None or self.backward is None:
            return None
        order = self.pre_backward_order
        for target in order.last[order._position : order._position + 2]:
            if target.state.sharded is ShardedState.SHARDED and target.unsharded.needs_unshard:
                return target
        return None

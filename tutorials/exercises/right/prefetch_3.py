"""The first order is built by a loop; the root is recorded like every other unit."""
# what is not here is in the reference, which is executed first

from minifsdp.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.support.prefetch_stats import PrefetchStats
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState, TrainingState


class Prefetcher:
    """Chooses the unit to gather next, from the recorded orders of one root.

    The hooks call the methods that are named after them, which return the target or None. The
    others only tell the statistics what happened.

    Args:
        backward: when to prefetch in the backward; None: never.
        forward: when to prefetch in the forward; None: never.

    Attributes:
        stats: the observer that counts; no choice depends on it.

    Raises:
        TypeError: an argument is something else, such as torch's enum of the same name.
    """

    def __init__(self, backward: BackwardPrefetch | None, forward: ForwardPrefetch | None) -> None:
        for given, kind in ((backward, BackwardPrefetch), (forward, ForwardPrefetch)):
            if given is not None and not isinstance(given, kind):
                raise TypeError(
                    f"{given!r} is not one of minifsdp.{kind.__name__}'s members, nor None (do not "
                    f"prefetch)"
                )
        self.backward, self.forward = backward, forward
        self.forward_where_it_helps = False  # the device decides on ``forward``; see `adapt_to`
        self.pre_forward_order = Order()
        self.post_forward_order = Order()
        self.pre_backward_order = Order()
        self.stats = PrefetchStats()

    def adapt_to(self, host_runs_ahead: bool) -> None:
        """Choose what ``forward_prefetch=None`` leaves open.

        A host that runs ahead asks for the gathers of the whole forward long before they are
        needed: nothing is to be gained. One that computes itself asks for each when the computation
        before it is over, and no gather of the forward would be hidden.
        """
        if self.forward_where_it_helps:
            self.forward = None if host_runs_ahead else ForwardPrefetch.FORWARD_PRE

    def start_forward(self) -> None:
        """The forward of the root begins."""
        self.pre_forward_order.start()
        self.post_forward_order.start()
        self.stats.start_pass()

    def start_backward(self) -> None:
        """A backward begins."""
        self.stats.start_pass()
        self.pre_backward_order.start()
        if len(self.pre_backward_order.last) == 0:
            for unit in self.post_forward_order.current:
                self.pre_backward_order.last.insert(0, unit)

    def forget(self) -> None:
        """An exception has ended the forward or the backward."""
        for order in (self.pre_forward_order, self.post_forward_order, self.pre_backward_order):
            order.forget()

    def pre_forward(self, unit: Unit) -> Unit | None:
        """The forward of ``unit`` begins. Returns the target of FORWARD_PRE."""
        target = _next(self.pre_forward_order, unit)
        return target if self.forward is ForwardPrefetch.FORWARD_PRE else None

    def post_forward(self, unit: Unit) -> Unit | None:
        """The forward of ``unit`` has ended. Returns the target of FORWARD_POST."""
        target = _next(self.post_forward_order, unit)
        return target if self.forward is ForwardPrefetch.FORWARD_POST else None

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

    def is_sound(self, target: Unit) -> bool:
        """Whether to gather ``target`` now: it is sharded, and has not had its turn yet in this
        backward. If not, this is counted."""
        sharded = target.state.sharded is ShardedState.SHARDED
        if sharded and target.state.training is not TrainingState.POST_BACKWARD:
            return True
        self.stats.skipped(target)
        return False

    def issued(self, target: Unit) -> None:
        """The all-gather of ``target`` is started as a prefetch."""
        self.stats.issued(target)

    def needed(self, unit: Unit) -> None:
        """``unit`` is about to be used; its all-gather may have been prefetched."""
        self.stats.needed(unit)

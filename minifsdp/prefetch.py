"""What next: which unit to gather before it is asked for.

A gather that starts when its unit is needed is a gather that the computation waits for. Models do
the same thing every step, so the order of one step foretells the next. Three orders are recorded::

    pre-forward    units in the order in which their forwards begin     root a  a.x  b
    post-forward   ... in which their forwards end                      a.x  a  b  root
    pre-backward   ... in which their backwards begin                   root b  a  a.x

and each hook looks up the unit that followed the current one the last time:

==========================  ==================  =====================================
``ForwardPrefetch``         FORWARD_PRE         pre-forward order, before computing
                            FORWARD_POST        post-forward order, after freeing
``BackwardPrefetch``        BACKWARD_PRE        pre-backward order, before computing
                            BACKWARD_POST       pre-backward order, after freeing
==========================  ==================  =====================================

In the first backward there is no pre-backward order yet. The reverse of the post-forward order is a
good guess, and the one that PyTorch keeps guessing for ever.

Guesses fail: post-forward order knows nothing of the units around the next one, and models change
course. A prefetch can find its target in three wrong states. None of them changes a result, because
a prefetch only gathers early what a hook would gather anyway; they cost memory or time:

- ``already unsharded``: nothing to do;
- ``not needed yet``: another unit is needed first, and has to queue behind the wrong gather;
- ``already resharded``: its turn in this backward is over; gathering it again would be pure waste.
"""

from minifsdp.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.unit import Unit
from minifsdp.unit_state import ShardedState, TrainingState


class Order:
    """The order of one kind of event: recorded in this pass, looked up in the last."""

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self.current: list[Unit] = []
        self._position = 0

    def start(self) -> None:
        """A new pass begins."""
        if self.current:
            self.last, self.current = self.current, []
        self._position = 0

    def forget(self) -> None:
        """The pass broke off; half an order is worse than the one before."""
        self.current = []

    def visit(self, unit: Unit) -> Unit | None:
        """Record ``unit``; the unit that came after it in the last pass, if there was one."""
        self.current.append(unit)
        # From where we stand, and only then from the start: a unit may come several times.
        rest = self.last[self._position :]
        if unit in rest:
            self._position += rest.index(unit) + 1
        elif unit in self.last:
            self._position = self.last.index(unit) + 1
        else:
            return None
        return self.upcoming()

    def upcoming(self) -> Unit | None:
        """The unit that came next in the last pass, from where we stand."""
        return self.last[self._position] if self._position < len(self.last) else None


class Prefetcher:
    """Names the unit to gather next, at each of the four places where there is a choice."""

    def __init__(self, backward: BackwardPrefetch | None, forward: ForwardPrefetch | None) -> None:
        for given, kind in ((backward, BackwardPrefetch), (forward, ForwardPrefetch)):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{given!r} is not one of minifsdp.{kind.__name__}'s, nor None")
        self.backward, self.forward = backward, forward
        self.forward_where_it_helps = False  # the device decides on ``forward``; see `adapt_to`
        self.pre_forward_order = Order()
        self.post_forward_order = Order()
        self.pre_backward_order = Order()
        self.prefetches = 0
        self.mistargets = dict.fromkeys(
            ("already unsharded", "not needed yet", "already resharded"), 0
        )
        self._pending: Unit | None = None  # prefetched, and not used yet

    def adapt_to(self, host_runs_ahead: bool) -> None:
        """Choose what ``forward_prefetch=None`` leaves open.

        A host that runs ahead asks for the gathers of the whole forward long before they are
        needed: nothing is to be gained. One that computes itself asks for each when the computation
        before it is over, and no gather of the forward would be hidden.
        """
        if self.forward_where_it_helps:
            self.forward = None if host_runs_ahead else ForwardPrefetch.FORWARD_PRE

    def start_forward(self) -> None:
        self.pre_forward_order.start()
        self.post_forward_order.start()
        self._pending = None

    def start_backward(self) -> None:
        order = self.pre_backward_order
        order.start()
        if not order.last:
            order.last = list(reversed(self.post_forward_order.current))
        self._pending = None

    def forget(self) -> None:
        for order in (self.pre_forward_order, self.post_forward_order, self.pre_backward_order):
            order.forget()

    def pre_forward(self, unit: Unit) -> Unit | None:
        target = _next(self.pre_forward_order, unit)
        return target if self.forward is ForwardPrefetch.FORWARD_PRE else None

    def post_forward(self, unit: Unit) -> Unit | None:
        target = _next(self.post_forward_order, unit)
        return target if self.forward is ForwardPrefetch.FORWARD_POST else None

    def pre_backward(self, unit: Unit) -> Unit | None:
        target = _next(self.pre_backward_order, unit)
        return target if self.backward is BackwardPrefetch.BACKWARD_PRE else None

    def post_backward(self, unit: Unit) -> Unit | None:
        # What follows the unit whose backward began last, which need not be the one that ends now,
        # ``unit``: units in units end after others have begun.
        target = self.pre_backward_order.upcoming()
        return target if self.backward is BackwardPrefetch.BACKWARD_POST else None

    def is_sound(self, target: Unit) -> bool:
        """Whether gathering ``target`` now makes sense; if not, it is counted and left alone."""
        if target.state.sharded is not ShardedState.SHARDED:
            if target.reshard_after_forward and target is not self._pending:
                self.missed("already unsharded", target)
        elif target.state.training is TrainingState.POST_BACKWARD:
            self.missed("already resharded", target)
        else:
            return True
        return False

    def issued(self, target: Unit) -> None:
        """``target`` is being gathered ahead of its time."""
        self.prefetches += 1
        self._pending = target

    def needed(self, unit: Unit) -> None:
        """``unit`` is used now. If another one was prefetched in its place, that is counted."""
        pending = self._pending
        if unit is pending:
            self._pending = None
        elif (
            pending is not None
            and unit.needs_unshard
            and unit.state.sharded is ShardedState.SHARDED
        ):
            self._pending = None  # count it once
            if pending.state.sharded is not ShardedState.SHARDED:
                self.missed("not needed yet", pending)

    def missed(self, how: str, target: Unit) -> None:
        """``target`` was the wrong unit to prefetch."""
        self.mistargets[how] += 1


def _next(order: Order, unit: Unit) -> Unit | None:
    if not unit.ancestors:
        # The root is where a pass begins, and never a target: it is unsharded all the while.
        return order.upcoming()
    # One without parameters gets no gradient, so that ranks do not agree (rank_agreement.py) on
    # whether they come to it. If some did and prefetched, the others would be waited for.
    return order.visit(unit) if unit.numel else None


def make_prefetcher(
    backward: BackwardPrefetch | None, forward: bool | ForwardPrefetch | None
) -> Prefetcher:
    """What ``backward_prefetch`` and ``forward_prefetch`` mean: True is FORWARD_PRE, and None is
    FORWARD_PRE on a device whose host does not run ahead.

    Raises:
        TypeError: they are something else.
    """
    prefetcher = Prefetcher(
        backward, ForwardPrefetch.FORWARD_PRE if forward is True else forward or None
    )
    prefetcher.forward_where_it_helps = forward is None
    return prefetcher

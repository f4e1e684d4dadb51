"""Prefetching: which unit to gather before it is needed.

If an all-gather starts when its unit is needed, the computation has to wait for it. Models do the
same in every step, so the order of units in one step predicts that of the next. Three orders are
recorded::

    pre-forward    units in the order in which their forwards begin     a  a.x  b
    post-forward   units in the order in which their forwards end       a.x  a  b
    pre-backward   units in the order in which their backwards begin    b  a  a.x

The root is in none of them: a pass begins with it, so it is never a target. When a pass comes to
the root, the target is the first unit of the order. A unit inside of it that has no parameters is
in none of them either, and has no target.

Each hook looks up the unit that followed the current one in the last pass:

==========================  ==================  ============================================
``ForwardPrefetch``         FORWARD_PRE         pre-forward order, before the unit computes
                            FORWARD_POST        post-forward order, after it is resharded
``BackwardPrefetch``        BACKWARD_PRE        pre-backward order, before the unit computes
                            BACKWARD_POST       pre-backward order, after it is resharded
==========================  ==================  ============================================

In the first backward there is no pre-backward order yet. The reverse of the post-forward order is
used in its place; PyTorch uses that in every step.

A target can be wrong: the post-forward order does not tell when the ancestors of the next unit are
needed, and models can change their order. A wrong target costs memory or time, and changes no
result.

Sources: Zhao et al., "PyTorch FSDP", arXiv:2304.11277, section 3.3; fairscale PRs 972 and 1052.
"""

from .api import BackwardPrefetch, ForwardPrefetch
from .unit import Unit
from .unit_state import ShardedState, TrainingState


class Order:
    """The order in which one kind of event visits the units of a root.

    Attributes:
        last: the order of the last pass that was complete.
        current: of this pass, so far. A unit may occur several times in both.
    """

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self.current: list[Unit] = []
        self._position = 0  # in ``last``, of the unit that is expected next

    def start(self) -> None:
        """A new pass begins."""
        if self.current:
            self.last, self.current = self.current, []
        self._position = 0

    def forget(self) -> None:
        """An exception has ended the pass. A part of an order would predict less than the last."""
        self.current = []

    def visit(self, unit: Unit) -> Unit | None:
        """Record ``unit``.

        Returns:
            The unit that came after it in the last pass; None if there is none.
        """
        self.current.append(unit)
        # First from the current position, and only then from the start, because a unit may occur
        # several times.
        for start in (self._position, 0):
            try:
                self._position = self.last.index(unit, start) + 1
            except ValueError:
                continue
            return self.upcoming()
        return None

    def upcoming(self) -> Unit | None:
        """The unit that came next in the last pass, from the current position."""
        return self.last[self._position] if self._position < len(self.last) else None


class Prefetcher:
    """Chooses the unit to gather next, from the recorded orders of one root.

    The engine calls the methods that are named after its moments, which return the target or None.

    Args:
        backward: when to prefetch in the backward; None: never.
        forward: when to prefetch in the forward; None: never.
    """

    def __init__(self, backward: BackwardPrefetch | None, forward: ForwardPrefetch | None) -> None:
        self.backward, self.forward = backward, forward
        self.pre_forward_order = Order()
        self.post_forward_order = Order()
        self.pre_backward_order = Order()

    def start_forward(self) -> None:
        """The forward of the root begins."""
        self.pre_forward_order.start()
        self.post_forward_order.start()

    def start_backward(self) -> None:
        """A backward begins."""
        order = self.pre_backward_order
        order.start()
        if not order.last:
            order.last = list(reversed(self.post_forward_order.current))

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
        target = _next(self.pre_backward_order, unit)
        return target if self.backward is BackwardPrefetch.BACKWARD_PRE else None

    def post_backward(self, unit: Unit) -> Unit | None:
        """The backward of ``unit`` has ended. Returns the target of BACKWARD_POST."""
        if self.backward is not BackwardPrefetch.BACKWARD_POST:
            return None
        # The unit after the one whose backward began last, which may be another one than ``unit``:
        # the backward of an outer unit ends after those of its inner units have begun.
        return self.pre_backward_order.upcoming()

    def is_sound(self, target: Unit) -> bool:
        """Whether to gather ``target`` now: it is sharded, and its turn in this backward has not
        come yet."""
        state = target.state
        return state.sharded is ShardedState.SHARDED and state.training not in _HAD_ITS_TURN


_HAD_ITS_TURN = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)


def forward_prefetch_of(
    given: bool | ForwardPrefetch | None, host_runs_ahead: bool
) -> ForwardPrefetch | None:
    """What the argument ``forward_prefetch`` means: True is FORWARD_PRE, False is no prefetching.

    None is what helps. A host that runs ahead asks for the gathers of the whole forward long before
    they are needed: nothing is to be gained. One that computes itself asks for each when the
    computation before it is over, and no gather of the forward would be hidden.
    """
    if given is None:
        given = not host_runs_ahead
    return ForwardPrefetch.FORWARD_PRE if given is True else given or None


def _next(order: Order, unit: Unit) -> Unit | None:
    if not unit.ancestors:
        # A pass begins at the root. It is never a target, because nothing comes before it.
        return order.upcoming()
    # A unit without parameters gets no gradient, so ranks need not agree on whether its backward
    # runs. If only some ranks prefetched there, they would wait for the others forever.
    return order.visit(unit) if unit.numel else None

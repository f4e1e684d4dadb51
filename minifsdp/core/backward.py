"""The three moments of a backward: before a unit's, after its gradient, and the end of all.

hooks.py has the moments of the forward and a table of all five. The three here come from autograd:
from a hook on an output, from a hook on the unsharded flat parameter, and from a callback that
autograd makes when it has nothing left to do.

No unit is known to be the first, because the loss may come from a part of the model, and none is
known to be the last. So whichever moment comes first calls :meth:`Backward.begin`, which asks
autograd for the callback at the end. If an exception ends the backward, the callback never comes;
the next step notices that.
"""

from collections.abc import Callable
from functools import partial

import torch

from .autograd_hooks import at_end_of_backward
from .engine import Engine
from .layers import Call, Chain
from .unit import Unit
from .unit_state import TrainingState


class Backward:
    """The backwards of one root's units, one after the other.

    Attributes:
        queued: a weak reference to what autograd keeps until the backward that is running is over.
            When it is dead, none is running. (On a GPU an exception reaches the program a moment
            before autograd's own thread lets go.)
        complete: the last one, if there was one, has come to its end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.queued: Callable[[], object] = _nothing
        self.complete = True
        for unit in engine.units:
            unit.on_gradient = partial(self.after_gradient, unit)

    @property
    def running(self) -> bool:
        """Whether this thread runs one. One that an exception has ended is not running."""
        return self.queued() is not None and _task() != -1

    def begin(self, call: Call | None = None) -> None:
        """A backward has begun. Does nothing if that is known already.

        Args:
            call: the one that a gradient has come to first; None if it is not known.
        """
        if self.queued() is not None:
            return
        self.forget_failed()
        for method in self.engine.moments.enter_backward:
            method()
        self.queued, self.complete = at_end_of_backward(self.end_of_backward), False
        self.engine.start_backward(call)

    def before_backward(self, calls: Chain, grads: object = None) -> None:
        """A gradient has reached an output of a unit, or autograd needs one of its parameters.

        Args:
            calls: the forward that has made this output or used this parameter, last, and those
                around it, outermost first. The backwards of those around it begin first, except of
                those whose gradient is complete already (POST_BACKWARD).

        Raises:
            RuntimeError: a layer has found that the gradients would be wrong.
        """
        self.begin(calls[-1])
        for call in calls[:-1]:
            # The loss may come from the inner unit alone, so that the outputs of those around it
            # get no gradient. What they computed before it is part of the graph all the same.
            if call.unit.state.training is not TrainingState.POST_BACKWARD:
                self._begin_backward(call)
        self._begin_backward(calls[-1])

    def _begin_backward(self, call: Call) -> None:
        moments, unit = self.engine.moments, call.unit
        if unit.state.training is TrainingState.PRE_BACKWARD:  # by another output
            for method in moments.again:
                method(call)
            return
        for method in moments.before_backward:
            method(call)
        self.engine.before_backward(unit, _task())

    def after_gradient(self, unit: Unit) -> None:
        """The unit's gradient is complete: the backward has gone through every use of it."""
        self.begin()
        if unit.state.training is TrainingState.PRE_BACKWARD and unit.state.graph_task != _task():
            return  # only a part, from a reentrant checkpoint inside of the unit; more will come
        self._gradient_of(unit)

    def _gradient_of(self, unit: Unit) -> None:
        grad = unit.view_maker.take_gradient(unit)
        for method in self.engine.moments.gradient:
            grad = method(unit, grad)
        self.engine.after_gradient(unit, grad)

    def end_of_backward(self) -> None:
        """Autograd has nothing left to do."""
        try:
            self._end()
        finally:
            self.queued = _nothing
        self.complete = True

    def _end(self) -> None:
        moments = self.engine.moments
        for unit in self.engine.units:
            if unit.view_maker.has_gradient(unit):
                self._gradient_of(unit)  # it came in parts only
        for method in moments.end_of_backward:
            method()
        reduced = self.engine.end_of_backward()
        for method in moments.complete:
            method(reduced)
        del reduced  # their results were added to gradients, and may be freed
        for method in moments.idle:
            method(False)

    def forget_failed(self) -> None:
        """If an exception has ended the last one, start as if it had never been."""
        if not self.complete:
            self.queued, self.complete = _nothing, True
            self.engine.fail()


def _nothing() -> None: ...


_task = torch._C._current_graph_task_id
"""Which backward autograd is running in this thread; -1 if none. A reentrant checkpoint runs one
inside of another."""

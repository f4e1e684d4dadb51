"""The three moments of a backward: before a unit's, after its gradient, and the end of all.

hooks.py has the moments of the forward and a table of all five. The three here come from autograd:
from a hook on an output or on a saved parameter, from a hook on the unsharded flat parameter, and
from a callback that autograd makes when it has nothing left to do.

No unit is known to be the first, because the loss may come from a part of the model, and none is
known to be the last. So whichever moment comes first calls :meth:`Backward.begin`, which asks
autograd for the callback at the end. If an exception ends the backward, the callback never comes;
the next step notices that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minifsdp.checks.misplaced_calls import (
    check_backward_outside,
    check_first_order,
    check_in_backward,
    check_one_step,
    check_unchanged,
)
from minifsdp.checks.rank_agreement import GradSource, Moment
from minifsdp.comm.pieces import whole
from minifsdp.engine import Engine
from minifsdp.no_sync import check_unreduced_grad
from minifsdp.support.autograd_hooks import at_end_of_backward, will_reach
from minifsdp.support.dispatch_modes import without_modes
from minifsdp.support.grad_hooks import change_gradient
from minifsdp.support.param_views import check_unreplaced, show_divided_params, use_sharded_views
from minifsdp.support.saved_tensors import Call, Chain, SavedParameters
from minifsdp.unit import Unit
from minifsdp.unit_state import BACKWARD, STRATEGY, TrainingState


class Backward:
    """The backwards of one root's units, one after the other.

    Attributes:
        calls: the forwards that are running now, outermost first; written by hooks.py.
        summoned: units whose parameters are out between steps; see hooks.py.
        saved: what autograd has saved of parameters.
        lent: units that were gathered in a forward for the module around them.
        graphs: forwards with gradients since the last backward.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.agreement = engine, engine.agreement
        self.calls: list[Call] = []
        self.summoned: dict[Unit, Any] = {}
        self.lent: list[Unit] = []
        self.graphs = 0
        self.saved = SavedParameters(self.gather)
        self._to_end: Callable[[], bool] | None = None
        for unit in engine.units:
            unit.unsharded_by_dtype.on_gradient = partial(self.after_gradient, unit)
            unit.on_demand = self.on_demand

    @property
    def running(self) -> bool:
        """Whether one is running. One that an exception has ended is not."""
        return self._to_end is not None and self._to_end()

    def begin_graph(self) -> None:
        """A forward with gradients begins. What is saved of its parameters is told from what graphs
        before it have saved."""
        self.graphs += 1
        for unit in self.engine.units:
            unit.unsharded.saved = [object()]

    def begin(self, training: bool | None) -> None:
        """A backward has begun. Does nothing if that is known already.

        Args:
            training: the mode that its graph was made in.
        """
        if self.running:
            return
        check_in_backward(_task())
        self.forget_failed()
        for unit in [*self.summoned]:
            unit.end_by_hand()  # it is gathered once more, by its own turn
        check_backward_outside(self.summoned)
        self.engine.compute_as(training)  # an evaluation came between, perhaps in full precision
        self._to_end = at_end_of_backward(self.end_of_backward, self._hide_all)
        self.engine.prefetcher.start_backward()
        self.agreement.at(Moment.START_OF_A_BACKWARD_BELOW, self.engine.root)
        for unit in self.engine.units:
            check_unreduced_grad(unit)
        self.agreement.agree(_source, not self.engine.no_sync.inside)
        self.engine.start_backward()

    @without_modes
    def before_backward(self, calls: Chain, grads: object = None) -> None:
        """A gradient has reached an output of a unit, or autograd needs one of its parameters.

        Args:
            calls: the forward that has made this output or used this parameter, last, and those
                around it, outermost first. The backwards of those around it begin first, except of
                those whose gradient is complete already (POST_BACKWARD).

        Raises:
            RuntimeError: a shard has been changed since; a step came between, or comes between
                this graph and another one that the backward goes through.
        """
        self.begin(calls[-1].training)
        for call in calls[:-1]:
            # The loss may come from the inner unit alone, so that the outputs of those around it
            # get no gradient. What they computed before it is part of the graph all the same.
            if call.unit.state.training is not TrainingState.POST_BACKWARD:
                self._begin_backward(call)
        self._begin_backward(calls[-1])

    @without_modes
    def on_demand(self, unit: Unit) -> bool:
        """A module asks for a parameter that is sharded. In a backward this is the recomputation
        of an activation checkpoint: autograd has saved nothing of what is in it, and the gradient
        may not have come through the outputs of the unit. In a forward without gradients it is a
        module that computes with the parameters of one inside of it, and does not call that one,
        as ``nn.TransformerEncoderLayer`` does. (With gradients they would need a call to be in.)

        Returns:
            Whether the unit is gathered now.
        """
        chain = self.saved.last.get(unit)
        if chain is not None and _task() >= 0:
            self.gather(chain)
        elif self._lends and not unit.uses_unsharded_views:
            check_unreplaced(unit)
            self.agreement.at(Moment.FORWARD_OF, unit)
            self.engine.before_forward(unit, prefetch=False)
            self.lent.append(unit)
        return unit.uses_unsharded_views

    def gather(self, calls: Chain) -> None:
        """Autograd needs a parameter of the last of the calls, also if its unit was freed early."""
        self.before_backward(calls)
        unit = calls[-1].unit
        if not unit.uses_unsharded_views:
            self.agreement.at(Moment.BACKWARD_OF, unit)
            self.engine.parameters.unshard_again(unit)

    @property
    def _lends(self) -> bool:
        """Whether a forward without gradients is running."""
        return bool(self.calls) and not self.running and not torch.is_grad_enabled()

    def _begin_backward(self, call: Call) -> None:
        unit = call.unit
        if unit.state.training is TrainingState.PRE_BACKWARD:  # by another output
            check_one_step(unit, call.version, self.saved.began[unit])
            return
        check_unchanged(unit, call.version)
        self.saved.began[unit] = call.version
        if unit.unsharded.needs_unshard:
            self.agreement.at(Moment.BACKWARD_OF, unit)
        for outer in unit.ancestors:
            self._free_early(outer)
        self.engine.before_backward(unit, call.unsharded, _task())

    def _free_early(self, unit: Unit) -> None:
        """The backward has come to a unit inside of this one. If nothing that is saved of this one
        is left, free it; its gradient is complete much later. So it is with most roots: the head's
        backward is over, and an embedding's needs no parameter.

        Not if there may be another graph, which the program has dropped. Python's collector decides
        when that is gone, and so on each rank at another time; but all have to free alike."""
        if BACKWARD not in unit.reasons or self.graphs != 1 or unit.unsharded.is_saved:
            return
        if unit.reasons <= {BACKWARD, STRATEGY}:
            self.engine.parameters.reshard_early(unit)

    @without_modes
    def after_gradient(self, unit: Unit) -> None:
        """The unit's gradient is complete: the backward has gone through every use of it."""
        self.begin(self.engine.training)
        if unit.state.training is TrainingState.PRE_BACKWARD and unit.state.graph_task != _task():
            return  # only a part, from a reentrant checkpoint inside of the unit; more will come
        self._gradient_of(unit)

    def _gradient_of(self, unit: Unit) -> None:
        grad = unit.view_maker.take_gradient(unit)
        check_first_order(unit, grad)
        if unit.unreduced_grad is not None:
            grad = whole(grad)  # what no_sync has left is added to it
        self.engine.after_gradient(unit, change_gradient(unit, grad))

    @without_modes
    def end_of_backward(self) -> None:
        """Autograd has nothing left to do."""
        for unit in self.engine.units:
            if unit.view_maker.has_gradient(unit):
                self._gradient_of(unit)  # it came in parts only
        self.graphs = 0
        self.agreement.at(Moment.END_OF_A_BACKWARD_BELOW, self.engine.root)
        self.engine.end_of_backward()
        show_divided_params(self.engine.units)
        self._to_end = None

    def _hide_all(self) -> None:
        for unit in self.engine.units:
            use_sharded_views(unit)  # else parameters() would list views until the next forward
        show_divided_params(self.engine.units)

    def forget_failed(self) -> None:
        """If an exception has ended the last one, start as if it had never been."""
        if self._to_end is None:
            return
        self._to_end, self.graphs = None, 0
        self.agreement.failed()
        self.engine.reset()
        self.engine.prefetcher.forget()


def _task() -> int:
    """Which backward autograd is running in this thread; -1 if none. A reentrant checkpoint runs
    one inside of another."""
    return torch._C._current_graph_task_id()


def _source(unit: Unit) -> GradSource:
    """Where this rank's gradient of a unit comes from, in the backward that has just begun."""
    if any(will_reach(node) for node in unit.unsharded_by_dtype.grad_accumulators):
        return GradSource.BACKWARD
    return GradSource.NO_SYNC if unit.unreduced_grad is not None else GradSource.NONE

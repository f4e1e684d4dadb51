"""The moments of a backward: before a unit's, after a unit's, and at the end of all.

Any unit may be the first to be reached, since the loss may come from a part of the model, and no
unit is known to be the last. So the first moment of a backward, whichever it is, calls
:meth:`Backward.begin`, and has autograd call :meth:`Backward.end` when nothing is left to do. If
something raises in between, that call never comes, and the next step finds out.

hooks.py has the moments of a forward, and the names of all five.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from minifsdp.checks.rank_agreement import GradSource, Moment
from minifsdp.engine import Engine
from minifsdp.no_sync import check_unreduced_grad
from minifsdp.support.autograd_hooks import at_end_of_backward, will_reach
from minifsdp.support.grad_hooks import change_gradient
from minifsdp.support.param_views import use_sharded_views, use_unsharded_views
from minifsdp.support.saved_tensors import Call, Chain, SavedParameters
from minifsdp.unit import Unit
from minifsdp.unit_state import TrainingState
from minifsdp.unshard import wait_for_unshard


class Backward:
    """The backwards of one root's units, one after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.agreement = engine, engine.agreement
        self.synchronizes = True  # gradients are reduced; not so inside no_sync
        self.calls: list[Call] = []  # forwards that are under way, outermost first
        self.saved = SavedParameters(self.pre_backward)
        self._to_end: Callable[[], bool] | None = None
        for unit in engine.units:
            unit.on_gradient, unit.on_demand = self.post_backward, self.on_demand

    @property
    def running(self) -> bool:
        """Whether one is under way. One that died of an exception is not."""
        return self._to_end is not None and self._to_end()

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Backwards in this block leave their gradients on this rank; see no_sync.py."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def begin(self, training: bool | None) -> None:
        """One has begun, if it had not before.

        Args:
            training: the mode that its graph was made in.
        """
        if self.running:
            return
        if _task() < 0:
            raise RuntimeError(
                "a parameter that autograd has saved was asked for outside of a backward. It is "
                "sharded then; read it inside of FSDP.summon_full_params(model)."
            )
        self.forget_the_dead()
        self.engine.compute_as(training)  # an evaluation came between, perhaps in full precision
        self._to_end = at_end_of_backward(self.end, self._hide_all)
        self.engine.prefetcher.start_backward()
        self.agreement.at(Moment.START_OF_A_BACKWARD_BELOW, self.engine.root)
        for unit in self.engine.units:
            check_unreduced_grad(unit)
        self.agreement.agree(_source, self.synchronizes)
        if self.agreement.diverged:  # once they go different ways, nothing may be gathered any more
            for unit in self.engine.units:
                self.engine.gather(unit)

    def pre_backward(self, calls: Chain, grads: object = None) -> None:
        """A gradient has reached an output of a unit, or autograd needs one of its parameters. It
        was computed in the last of ``calls``, inside of the others.

        Raises:
            RuntimeError: a shard has been changed since; a step came between.
        """
        self.begin(calls[-1].training)
        for call in calls[:-1]:
            # The loss may come from the inner unit alone, with no gradient for the outputs of those
            # around it. What they computed before it is part of the graph all the same.
            if call.unit.state.training is not TrainingState.POST_BACKWARD:
                self._begin_backward(call)
        self._begin_backward(calls[-1])

    def on_demand(self, unit: Unit) -> bool:
        """A module asks for a parameter that is sharded. In a backward it is one that an activation
        checkpoint runs again: autograd has saved nothing of what is in it, and the gradient may
        have come past the outputs of the unit.

        Returns:
            Whether the unit is gathered now.
        """
        chain = self.saved.last.get(unit)
        if chain is not None and _task() >= 0:
            self.pre_backward(chain)
        return unit.uses_unsharded_views

    def _begin_backward(self, call: Call) -> None:
        unit = call.unit
        if unit.state.training is TrainingState.PRE_BACKWARD:
            return  # by another output
        if unit.sharded_flat_param._version != call.version:
            raise RuntimeError(
                f"the parameters of unit {unit.label} were changed in place (by an optimizer?) "
                f"between a forward and its backward, so its gradients would be wrong. Call "
                f"backward() for every forward before you step."
            )
        if unit.needs_unshard:
            self.agreement.at(Moment.BACKWARD_OF, unit)
        self.engine.prefetcher.needed(unit)
        if unit.unsharded is not call.unsharded:
            self.engine.free(unit)  # gathered for a forward in another precision
            unit.compute_with(call.unsharded)
        self.engine.gather(unit)
        unit.state.start_backward(_task())
        self.engine.prefetch(self.engine.prefetcher.pre_backward(unit))
        wait_for_unshard(unit)
        use_unsharded_views(unit)  # activation checkpointing runs parts of a forward again in here

    def post_backward(self, unit: Unit) -> None:
        """The unit's gradient is complete: the backward has gone through every use of it."""
        self.begin(self.engine.training)
        if unit.state.training is TrainingState.PRE_BACKWARD and unit.state.graph_task != _task():
            return  # a part of it, from a reentrant checkpoint inside of the unit; more will come
        self._gradient_of(unit)

    def _gradient_of(self, unit: Unit) -> None:
        assert unit.unsharded.flat_param.grad is not None
        # Taken away before it is reduced: nobody may add to it while it is being sent.
        grad, unit.unsharded.flat_param.grad = unit.unsharded.flat_param.grad, None
        if grad.requires_grad:
            raise RuntimeError(
                f"unit {unit.label}: gradients of gradients (create_graph=True) are not supported, "
                f"because the reduction over ranks cannot be differentiated."
            )
        grad = change_gradient(unit, grad)
        unit.state.complete_grad()
        if not self._keeps(unit):
            self.engine.done_with(unit)
        self.engine.prefetch(self.engine.prefetcher.post_backward(unit))
        if not unit.numel:
            return
        if self.synchronizes and not self.agreement.diverged:
            self.engine.reduce(unit, grad)
        else:
            self.engine.keep(unit, grad)

    def end(self) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it."""
        for unit in self.engine.units:
            if unit.unsharded.flat_param.grad is not None:
                self._gradient_of(unit)  # all of it came in parts
        self.agreement.at(Moment.END_OF_A_BACKWARD_BELOW, self.engine.root)
        for unit in self.agreement.late:
            self.engine.reduce_kept(unit)
        self.engine.finish_gradients()
        if self.agreement.diverged:
            self.engine.prefetcher.pre_backward_order.forget()  # every rank has seen another one
            self.agreement.diverged = False
        self._to_end = None
        in_use = {call.unit for call in self.calls}  # if this is torch.autograd.grad in a forward
        for unit in self.engine.units:
            if self._keeps(unit):
                unit.kept_version = unit.sharded_flat_param._version
                use_sharded_views(unit)
            elif unit not in in_use:
                self.engine.free(unit)  # its outputs, or some, were not part of this backward
            unit.state.end_backward()

    def _keeps(self, unit: Unit) -> bool:
        """Whether a unit stays gathered after a backward: in no_sync, for the next forward, since
        no optimizer steps in between; unless the strategy is to save its memory."""
        return not (self.synchronizes or unit.reshard_after_forward)

    def _hide_all(self) -> None:
        for unit in self.engine.units:
            use_sharded_views(unit)  # else parameters() would list views until the next forward

    def forget_the_dead(self) -> None:
        """If the last one died of an exception, start as if it had never been."""
        if self._to_end is None:
            return
        self._to_end = None
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

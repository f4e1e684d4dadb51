"""What the units of one root share, and what happens to a unit at the five moments of a step.

hooks.py and backward.py know *when* a moment has come, and call the method of the same name here.
What else there is to do at a moment is done by layers (layers.py), before it or after it. Each
method is a few lines. It gathers parameters and frees them (parameters.py), asks which unit comes
next (prefetch.py), and sends gradients on their way (gradients.py):

- **Before forward.** Start to gather the unit. Start to gather what comes next; the computation
  does not wait for that one. Let it wait for this unit. Make new views for the module.
- **After forward.** Free the unit, unless its backward comes soon (STRATEGY).
- **Before backward.** As in the forward, but without new views: the graph has those of the forward,
  and they show the same memory.
- **After gradient.** Free the unit first, so that what is gathered next can have its memory. Gather
  what comes next. Start to reduce the gradient.
- **End of backward.** Free what is still there: a unit whose outputs had no part in the loss, for
  example. Wait for all reductions, and give the optimizer its gradients.

To free a unit is to let go of the reason of this moment; it stays if there is another reason
(unit_state.py).
"""

from collections.abc import Iterable
from typing import Any

import torch

from .gradients import Gradients
from .layers import Call, Layer, Moments
from .parameters import Parameters
from .reduce import Reduction
from .streams import Event
from .unit import Unit
from .unit_state import BACKWARD, FORWARD, OF_A_STEP, PREFETCH, STRATEGY, Purpose
from .unshard import wait_for_unshard
from .views import hide_views, make_views, show_views


class Engine:
    """All units below one root.

    Args:
        units: the root's first, then in the order of ``named_modules()``.
        parameters, gradients: of this root alone.

    Attributes:
        moments: of its layers; without any till :meth:`use`.
    """

    def __init__(self, units: list[Any], parameters: Parameters, gradients: Gradients) -> None:
        self.units, self.root = units, units[0]
        self.parameters, self.gradients = parameters, gradients
        self.streams, self.prefetcher = parameters.streams, parameters.prefetcher
        self.moments = Moments()
        for unit in units:
            unit.free = self._free

    def use(self, layers: Iterable[Layer]) -> None:
        """Have these layers, in this order."""
        self.moments = Moments(layers)

    def _free(self, unit: Unit) -> None:
        """No reason to keep the unit is left."""
        self.parameters.reshard(unit)
        for method in self.moments.freed:
            method(unit)

    def start(self, purpose: Purpose) -> None:
        """Be ready for a forward, or for a look at parameters: nothing is left of the last step.

        Raises:
            ValueError, RuntimeError: a layer has found that the model cannot be used as it is.
        """
        self.reset()
        for method in self.moments.start:
            method(purpose)
        # The gathers to come must send what the optimizer has just written.
        self.streams.unshard.wait_event(self.written())

    def written(self) -> Event:
        """Passed when the shards have their values."""
        return self.streams.compute.record_event()

    def reset(self) -> None:
        """Drop what a failed forward or backward has left, and what a forward without a backward
        keeps."""
        for method in self.moments.reset:
            method()
        self.gradients.drop()
        for unit in self.units:
            unit.let_go(*OF_A_STEP)
            unit.state.start_step()

    def fail(self) -> None:
        """A forward or a backward has failed: all is as if it had never begun."""
        for method in self.moments.failed:
            method()
        self.reset()
        for unit in self.units:
            unit.view_maker.drop_gradient(unit)
        self.prefetcher.forget()

    # ---------------------------------------------------------------- the five moments of a step

    def before_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module is about to run: give it its parameters, as views known to autograd.

        Args:
            prefetch: this forward is part of a step, whose order tells what comes next.
        """
        self.parameters.unshard(unit, FORWARD)
        if prefetch:
            self.parameters.prefetch(self.prefetcher.pre_forward(unit))
        wait_for_unshard(unit)
        make_views(unit)
        show_views(unit)

    def after_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module has run. If a backward may follow, hold the unit for it, if that is the unit's
        strategy. Free it otherwise, and gather what comes next."""
        if torch.is_grad_enabled():
            unit.state.run_forward()
            # The root's backward comes right after its forward: freeing it would gain nothing.
            if unit is self.root or not unit.reshard_after_forward:
                unit.hold(STRATEGY)
        self.leave(unit)
        if prefetch:
            self.parameters.prefetch(self.prefetcher.post_forward(unit))

    def leave(self, unit: Unit) -> None:
        """The unit's module runs no more, also because it has raised. A unit that stays gets its
        sharded views, because parameters() must not list views between steps; not so in its own
        backward, where an activation checkpoint may run another part of it."""
        unit.let_go(FORWARD)
        if unit.reasons and BACKWARD not in unit.reasons:
            hide_views(unit)

    def end_of_forward(self) -> None:
        """The outermost module has run. Free what was gathered ahead for a forward that did not
        come and, without gradients, what was held for a backward that will not."""
        over = {PREFETCH} if torch.is_grad_enabled() else {PREFETCH, STRATEGY}
        for unit in self.units:
            if unit.reasons & over:
                unit.let_go(*over)

    def start_backward(self, call: Call | None) -> None:
        """A backward begins.

        Args:
            call: the one that a gradient has come to first; None if it is not known.
        """
        self.prefetcher.start_backward()
        for method in self.moments.start_backward:
            method(call)

    def before_backward(self, unit: Unit, graph_task: int) -> None:
        """The first gradient has reached the unit: gather its parameters again.

        Args:
            graph_task: autograd's number of this backward.
        """
        self.parameters.unshard(unit, BACKWARD)
        unit.state.start_backward(graph_task)
        self.parameters.prefetch(self.prefetcher.pre_backward(unit))
        wait_for_unshard(unit)
        show_views(unit)  # activation checkpointing runs parts of a forward again in here

    def after_gradient(self, unit: Unit, grad: Any) -> None:
        """The gradient of the unit, ``[padded_numel]``, is complete: free its parameters, reduce
        the gradient. If it is a tensor nobody else may hold it."""
        unit.state.complete_grad()
        unit.let_go(BACKWARD, STRATEGY)
        self.parameters.prefetch(self.prefetcher.post_backward(unit))
        if unit.numel:
            self.gradients.take(unit, grad)

    def end_of_backward(self) -> list[Reduction]:
        """Every unit is sharded again, every gradient where the optimizer looks for it.

        A unit whose forward is still running stays, if that has called torch.autograd.grad.

        Returns:
            The reductions, in their order. Their results are where the optimizer finds them.
        """
        for unit in self.units:
            if unit.reasons:  # its outputs had no gradient, or somebody keeps it
                if FORWARD not in unit.reasons:
                    hide_views(unit)
                unit.let_go(BACKWARD, STRATEGY, PREFETCH)
            unit.state.end_backward()
        return self.gradients.finish()

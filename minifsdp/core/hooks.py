"""When: the five moments of a training step, and the two of them that belong to the forward.

A step of plain PyTorch is two calls, ``model(x)`` and ``loss.backward()``. FSDP acts between the
layers of both, at five moments::

    before forward     before a unit's module runs             gather its parameters
    after forward      after it has run                        free them
    before backward    when the first gradient reaches an      gather them again
                       output of the module
    after gradient     when the unit's gradient is complete    free them, reduce the gradient
    end of backward    after autograd's last operation         wait for all reductions, and give
                                                               the optimizer its gradients

The first two are here: they surround a call of the module. The other three are in backward.py,
because autograd calls them. Both files only say *when*. What is done is in the method of the same
name in engine.py.

Why the output? Every ordinary model uses a unit's outputs, and their gradient comes early enough
for prefetching. A module may also hand on tensors in ways that cannot be seen: an attribute, a
closure. Then the backward of its unit begins when autograd needs a parameter that it has saved, of
which the core is not told (minifsdp's on_demand.py is).
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from .autograd_hooks import after_gradients_of, before_gradient_of
from .backward import Backward
from .layers import Call
from .outputs import tensors_in
from .unit import Unit
from .unit_state import BACKWARD, STRATEGY, Purpose


class Hooks:
    """The forwards of all units below one root.

    Args:
        backward: the backwards of the same units.

    Attributes:
        calls: the forwards that are running now, outermost first.
    """

    def __init__(self, backward: Backward) -> None:
        self.engine, self.backward = backward.engine, backward
        self.calls: list[Call] = []
        self.depth = 0  # of forwards within forwards

    def forward(self, unit: Unit, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit's module, between its two moments.

        Args:
            module: of a list of modules the one that runs. The mode of the outermost one counts.
            run: what to call, with ``args`` and ``kwargs``.
        """
        moments = self.engine.moments
        if unit is self.engine.root or not self.depth:
            for method in moments.enter:
                method(unit)
        self.depth += 1
        try:
            call, args, kwargs = self.before_forward(unit, module, args, kwargs)
            if moments.around_forward or moments.error:
                output = moments.run(call, run, args, kwargs)
            else:
                output = run(*args, **kwargs)
            return self.after_forward(call, output)
        except BaseException:
            self.forward_failed(unit)
            raise
        finally:
            self.depth -= 1
            del self.calls[self.depth :]

    def before_forward(
        self, unit: Unit, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Call, Any, Any]:
        """The module is about to run.

        Returns:
            This call, and the arguments for the module.
        """
        engine, moments = self.engine, self.engine.moments
        in_backward = self.backward.running
        outermost = self.depth == 1 and not in_backward
        if outermost:  # a step begins
            self.backward.forget_failed()
            engine.start(Purpose.TRAIN if module.training else Purpose.EVAL)
            engine.prefetcher.start_forward()
        # A checkpoint that runs a part again in a backward tells nothing of the next step.
        in_order = not in_backward and (self.calls[-1].in_order if self.calls else outermost)
        call = Call(unit, module, in_order, outermost)
        for method in moments.before_forward:
            method(call)
        engine.before_forward(unit, prefetch=call.in_order)
        self.calls.append(call)
        for method in moments.gathered:
            method(call)
        frozen = not unit.sharded_flat_param.requires_grad
        if unit.unsharded.needs_unshard and frozen and torch.is_grad_enabled():
            self._free_when_inputs_have_gradients(unit, args, kwargs)
        for method in moments.inputs:
            args, kwargs = method(call, args, kwargs)
        return call, args, kwargs

    def after_forward(self, call: Call, output: Any) -> Any:
        """The module has run. Its backward begins with a gradient of one of its outputs.

        Returns:
            The output.
        """
        engine, moments = self.engine, self.engine.moments
        for method in moments.after_forward:
            output = method(call, output)
        if torch.is_grad_enabled():
            hook = partial(self.backward.before_backward, tuple(self.calls))
            for tensor in tensors_in(output):
                before_gradient_of(tensor, hook, call.first)
        engine.after_forward(call.unit, prefetch=call.in_order)
        if call.outermost:
            for method in moments.end_of_forward:
                method(call.unit)
            engine.end_of_forward()
            for method in moments.idle:
                method(torch.is_grad_enabled())
        return output

    def forward_failed(self, unit: Unit) -> None:
        """The module has raised. Leave everything so that the next forward finds it in order."""
        if self.depth > 1 or self.backward.running:
            self.engine.leave(unit)  # only this one: its caller may catch the exception
            return
        self.engine.fail()
        for method in self.engine.moments.idle:
            method(False)

    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit has no gradient of its own to wait for. Its backward is over when its inputs
        # have theirs; where they get none, the unit is freed at the end of the whole backward.
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        after_gradients_of(inputs, partial(self.inputs_have_gradients, unit))

    def inputs_have_gradients(self, unit: Unit, grads: object) -> None:
        """The inputs of a frozen unit have their gradients: its backward is over."""
        unit.state.complete_grad()
        unit.let_go(BACKWARD, STRATEGY)

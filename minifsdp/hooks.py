"""When: the moments of a training step at which the engine acts.

A step of plain PyTorch is two calls, ``model(x)`` and ``loss.backward()``. FSDP has to get a word
in between the layers of both, and there are five places for it::

    pre-forward     before a unit's module runs           gather its parameters
    post-forward    after it                              free them
    pre-backward    when a gradient first reaches one     gather them again
                    of the module's outputs
    post-backward   when the gradient of ``unit.full``    free them, reduce the gradient
                    is complete
    end of          after the last operation of the       collect what is still under way,
    backward        whole backward                        give the optimizer its gradients

This file says only *when*. What is done is told in unshard.py, reshard.py and reduce.py, what next
in prefetch.py, how many at once in limiter.py.

Two things the hooks cannot see. A tensor that leaves a unit by another door than its module's
return value (an attribute set on the side): if its gradient comes before that of the unit's
outputs, the unit is not gathered in time; return such tensors. And *reentrant* activation
checkpointing, which runs backwards within the backward: a unit with several such checkpoints inside
gets its gradient in parts, and is freed after the first; ``use_reentrant=False`` avoids that.
"""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from minifsdp.engine import Engine
from minifsdp.nest import tensors_in
from minifsdp.unit import Phase, Unit
from minifsdp.unshard import wait_for_unshard


class Hooks:
    """The hooks of all units below one root."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prefetcher = engine.prefetcher
        self.depth = 0  # of forwards within forwards
        self.summoned = False  # full parameters are out, between steps (full_params.py)
        self._backward: weakref.ref[Callable[[], None]] | None = None
        for unit in engine.units:
            unit.on_gradient = self.post_backward

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way. One that died of an exception is not: autograd has let
        go of its callback then, and the weak reference to it is dead."""
        return self._backward is not None and self._backward() is not None

    @property
    def idle(self) -> bool:
        """Between steps."""
        return self.depth == 0 and not self.in_backward

    @property
    def _outermost(self) -> bool:
        """In a forward that is not part of another, nor of a backward."""
        return self.depth == 1 and not self.in_backward

    # ------------------------------------------------------------------------------------ forward

    def pre_forward(self, unit: Unit, args: object, kwargs: object) -> None:
        """The module is about to run. Its parameters have to be there, as views known to autograd.

        Raises:
            RuntimeError: the model was called inside ``summon_full_params``.
        """
        if self.summoned:
            raise RuntimeError(
                "the model was called inside summon_full_params, which holds its parameters. "
                "Leave the block first; forward gathers by itself."
            )
        if self._outermost:
            self._forget_dead_backward()
            self.engine.start()
            self.prefetcher.start_forward()
        self.prefetcher.needed(unit)
        self.engine.gather(unit)
        if not self.in_backward:  # there, it is activation checkpointing that runs a forward again
            self.engine.prefetch(self.prefetcher.pre_forward(unit))
        wait_for_unshard(unit)
        unit.make_views()
        unit.expose()
        if unit.sharded and not unit.shard.requires_grad and torch.is_grad_enabled():
            self._free_when_inputs_have_gradients(unit, args, kwargs)

    def post_forward(self, unit: Unit, output: object) -> None:
        """The module has run. Free its parameters, and see that the backward finds them again.

        Raises:
            RuntimeError: the output is one of those parameters.
        """
        if torch.is_grad_enabled():
            if unit.phase is not Phase.BACKWARD:
                unit.phase = Phase.FORWARD
            self._hook_outputs(unit, output)
        if not self._stays(unit):
            self.engine.free(unit)
        if not self.in_backward:
            self.engine.prefetch(self.prefetcher.post_forward(unit))
        if self._outermost:
            for other in self.engine.units:  # prefetched for a forward that did not come
                if not self._stays(other):
                    self.engine.free(other)

    def forward_failed(self, unit: Unit) -> None:
        """The module raised. Leave everything so that the next forward finds it in order."""
        if self.summoned:
            return  # refused above: nothing was touched, and nothing may be
        if self._outermost:
            self.engine.reset()
            self.prefetcher.forget()
        elif unit.phase is not Phase.BACKWARD:
            self.engine.free(unit)  # this one only: its caller may catch the exception and go on

    def _stays(self, unit: Unit) -> bool:
        """Whether the unit keeps its parameters when its forward ends."""
        if not torch.is_grad_enabled():
            return False  # no backward will come for them
        if unit.phase is Phase.FORWARD:
            # The root's backward comes right after its forward: freeing it would gain nothing.
            return unit is self.engine.root or not unit.reshard_after_forward
        return unit.phase is Phase.BACKWARD  # checkpointing: its backward is waiting for this

    def _hook_outputs(self, unit: Unit, output: object) -> None:
        hook = partial(self.pre_backward, unit, unit.shard._version)
        for tensor in tensors_in(output):
            if tensor._base is not None and tensor._base is unit.full:
                if not self._stays(unit):
                    raise RuntimeError(
                        f"the module of unit {unit.label} returns one of its own parameters, which "
                        f"is freed when its forward ends. Return a copy (parameter.clone()), or "
                        f"use it inside the module."
                    )
            elif tensor.grad_fn is not None:  # a leaf needs no parameters to get its gradient
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit gets no gradient, so no post-backward. It is done with when its inputs have
        # theirs; where they get none, it waits for the end of the backward.
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]

        def free(grads: object) -> None:
            unit.phase = Phase.DONE
            self.engine.free(unit)

        if inputs:
            register_multi_grad_hook(inputs, free)

    # ----------------------------------------------------------------------------------- backward

    def pre_backward(self, unit: Unit, version: int, grad: Tensor) -> None:
        """A gradient has reached an output of ``unit``, whose shard had this version then.

        Raises:
            RuntimeError: the shard has been changed since; a step came between.
        """
        self._ensure_backward()
        if unit.phase is Phase.BACKWARD:
            return  # by another output
        if unit.shard._version != version:
            raise RuntimeError(
                f"the parameters of unit {unit.label} were changed in place (by an optimizer?) "
                f"between a forward and its backward, so its gradients would be wrong. Call "
                f"backward() for every forward before you step."
            )
        self.prefetcher.needed(unit)
        # The loss may come from this unit alone, with no gradient for the outputs of those around
        # it. What they computed before it is part of the graph all the same.
        around = [other for other in unit.enclosing if other.phase is Phase.FORWARD]
        for needed in [*around, unit]:
            self.engine.gather(needed)
        unit.phase = Phase.BACKWARD
        self.engine.prefetch(self.prefetcher.pre_backward(unit))
        for needed in [*around, unit]:
            wait_for_unshard(needed)
            needed.expose()  # activation checkpointing runs parts of a forward again in here

    def post_backward(self, unit: Unit) -> None:
        """The gradient of ``unit.full`` is complete: the backward has gone through every use."""
        self._ensure_backward()
        assert unit.full is not None and unit.full.grad is not None
        # Taken away before it is reduced: nobody may add to it while it is being sent.
        grad, unit.full.grad = unit.full.grad, None
        if grad.requires_grad:
            raise RuntimeError(
                f"unit {unit.label}: gradients of gradients (create_graph=True) are not supported, "
                f"because the reduction over ranks cannot be differentiated."
            )
        unit.phase = Phase.DONE
        self.engine.free(unit)
        self.engine.prefetch(self.prefetcher.post_backward())
        if unit.numel:
            self.engine.reduce(unit, grad)

    def end_of_backward(self) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it."""
        self.engine.finish_reductions()
        self._backward = None
        for unit in self.engine.units:
            self.engine.free(unit)  # its outputs, or some of them, were not part of this backward
            if unit.phase is not Phase.IDLE:
                unit.phase = Phase.FORWARD  # another graph may yet come through it

    def _ensure_backward(self) -> None:
        """Have autograd call us when this backward ends. Any unit may be the first to be reached,
        not only the root's: the loss may come from a part of the model."""
        if self.in_backward:
            return
        self._forget_dead_backward()
        callback = self.end_of_backward
        Variable._execution_engine.queue_callback(callback)
        self._backward = weakref.ref(callback)  # to this bound method, which autograd holds
        self.prefetcher.start_backward()

    def _forget_dead_backward(self) -> None:
        """The last backward died of an exception: start as if it had never been."""
        if self._backward is None:
            return
        self._backward = None
        ran = [unit for unit in self.engine.units if unit.phase is not Phase.IDLE]
        self.engine.reset()
        self.prefetcher.forget()
        for unit in ran:  # another graph through them may be next
            unit.phase = Phase.FORWARD

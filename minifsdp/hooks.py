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
in prefetch.py, how many at once in limiter.py, whether all ranks do the same in lockstep.py.

Two things the hooks cannot see. A tensor that leaves a unit by another door than its module's
return value (an attribute set on the side): if its gradient comes before that of the unit's
outputs, the unit is not gathered in time; return such tensors. And *reentrant* activation
checkpointing, which runs backwards within the backward: a unit with several such checkpoints inside
gets its gradient in parts, and is freed after the first; ``use_reentrant=False`` avoids that.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from minifsdp.engine import Engine
from minifsdp.lockstep import Moment, Use
from minifsdp.nest import tensors_in
from minifsdp.precision import prepare_inputs
from minifsdp.prefetch import Prefetcher
from minifsdp.unit import Phase, Unit
from minifsdp.unshard import wait_for_unshard
from minifsdp.unsynced import check_waiting_gradient


class Call(NamedTuple):
    """One forward of a unit, and what its backward has to find again."""

    unit: Unit
    full: Tensor
    version: int  # of the shard
    training: bool | None  # the mode of the outermost module


class Hooks:
    """The hooks of all units below one root."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lockstep = engine.lockstep
        self.depth = 0  # of forwards within forwards
        self.calls: list[Call] = []  # those forwards, outermost first
        self.training: bool | None = None  # the mode of the outermost module, in the last of them
        self.summoned: set[Unit] = set()  # their parameters are out, between steps (full_params.py)
        self.synchronizes = True  # gradients are reduced; not so inside no_sync
        self._backward: weakref.ref[Callable[[], None]] | None = None
        for unit in engine.units:
            unit.on_gradient = self.post_backward

    @property
    def prefetcher(self) -> Prefetcher:
        return self.engine.prefetcher

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

    def pre_forward(
        self, unit: Unit, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module is about to run. Its parameters have to be there, as views known to autograd.

        Args:
            training: the module's mode; the outermost one's counts.

        Returns:
            What the module should be called with.

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
            self.training = training
            self.engine.start(training)
            self.lockstep.steps += 1
            self.prefetcher.start_forward()
        if unit.transient or not self.in_backward:  # else it is nobody else's business
            self.lockstep.at(Moment.FORWARD_OF, unit)
        self.prefetcher.needed(unit)
        self.engine.gather(unit)
        if not self.in_backward:  # there, it is activation checkpointing that runs a forward again
            self.engine.prefetch(self.prefetcher.pre_forward(unit))
        wait_for_unshard(unit)
        unit.make_views()
        unit.expose()
        assert unit.full is not None
        version = unit.shard._version
        self.calls.append(Call(unit, unit.full, version, self.training))
        if unit.transient and not unit.shard.requires_grad and torch.is_grad_enabled():
            self._free_when_inputs_have_gradients(unit, args, kwargs)
        # Also where a checkpoint around the root runs it again, which is then not the outermost.
        is_root = unit is self.engine.root or self._outermost
        return prepare_inputs(unit, is_root, args, kwargs)

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
            self._done_with(unit)
        if not self.in_backward:
            self.engine.prefetch(self.prefetcher.post_forward(unit))
        if self._outermost:
            self.lockstep.at(Moment.END_OF_FORWARD_OF, unit)
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
            self._done_with(unit)  # this one only: its caller may catch the exception and go on

    def _stays(self, unit: Unit) -> bool:
        """Whether the unit keeps its parameters when its forward ends."""
        if not torch.is_grad_enabled():
            return False  # no backward will come for them
        if unit.phase is Phase.FORWARD:
            # The root's backward comes right after its forward: freeing it would gain nothing.
            return unit is self.engine.root or not unit.reshard_after_forward
        return unit.phase is Phase.BACKWARD  # checkpointing: its backward is waiting for this

    def _hook_outputs(self, unit: Unit, output: object) -> None:
        hook = partial(self.pre_backward, list(self.calls))
        for tensor in tensors_in(output):
            if tensor._base is not None and tensor._base is unit.full:
                if not self._stays(unit):
                    raise RuntimeError(
                        f"the module of unit {unit.label} returns one of its own parameters, which "
                        f"is freed when its forward ends. Return a copy (parameter.clone()), or "
                        f"use it inside the module."
                    )
            elif tensor.grad_fn is not None:  # a leaf needs no parameters to get its gradient
                # Not the tensor's own hook. If it goes into the same unit once more, and the unit
                # is frozen, that call frees when the tensor has its gradient; this must come after.
                tensor.grad_fn.register_prehook(hook)

    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit gets no gradient, so no post-backward. It is done with when its inputs have
        # theirs; where they get none, it waits for the end of the backward.
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]

        def free(grads: object) -> None:
            unit.phase = Phase.DONE
            self._done_with(unit)

        if inputs:
            register_multi_grad_hook(inputs, free)

    # ----------------------------------------------------------------------------------- backward

    def pre_backward(self, calls: list[Call], grads: object) -> None:
        """A gradient has reached an output of a unit, which was computed in the last of ``calls``,
        inside of the others.

        Raises:
            RuntimeError: a shard has been changed since; a step came between.
        """
        self._ensure_backward(calls[-1].training)
        for call in calls[:-1]:
            # The loss may come from the inner unit alone, with no gradient for the outputs of those
            # around it. What they computed before it is part of the graph all the same.
            if call.unit.phase is not Phase.DONE:
                self._begin_backward(call)
        self._begin_backward(calls[-1])

    def _begin_backward(self, call: Call) -> None:
        unit = call.unit
        if unit.phase is Phase.BACKWARD:
            return  # by another output
        if unit.shard._version != call.version:
            raise RuntimeError(
                f"the parameters of unit {unit.label} were changed in place (by an optimizer?) "
                f"between a forward and its backward, so its gradients would be wrong. Call "
                f"backward() for every forward before you step."
            )
        if unit.transient:
            self.lockstep.at(Moment.BACKWARD_OF, unit)
        self.prefetcher.needed(unit)
        if unit.full is not call.full:
            self.engine.free(unit)  # gathered for a forward in another precision
            unit.compute_with(call.full)
        self.engine.gather(unit)
        unit.phase = Phase.BACKWARD
        self._prefetch_in_backward(self.prefetcher.pre_backward(unit))
        wait_for_unshard(unit)
        unit.expose()  # activation checkpointing runs parts of a forward again in here

    def post_backward(self, unit: Unit) -> None:
        """The gradient of ``unit.full`` is complete: the backward has gone through every use."""
        self._ensure_backward(self.training)
        assert unit.full is not None and unit.full.grad is not None
        # Taken away before it is reduced: nobody may add to it while it is being sent.
        grad, unit.full.grad = unit.full.grad, None
        if grad.requires_grad:
            raise RuntimeError(
                f"unit {unit.label}: gradients of gradients (create_graph=True) are not supported, "
                f"because the reduction over ranks cannot be differentiated."
            )
        unit.phase = Phase.DONE
        self._done_with(unit)
        self._prefetch_in_backward(self.prefetcher.post_backward(unit))
        if not unit.numel:
            return
        if self.synchronizes and not self.lockstep.apart:
            self.engine.reduce(unit, grad)
        else:
            self.engine.keep(unit, grad)

    def end_of_backward(self) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it."""
        self.lockstep.at(Moment.END_OF_A_BACKWARD_BELOW, self.engine.root)
        for unit in self.lockstep.late:
            self.engine.reduce_kept(unit)
        self.engine.finish_gradients()
        if self.lockstep.apart:
            self.prefetcher.pre_backward_order.forget()  # every rank has seen another one
            self.lockstep.apart = False
        self._backward = None
        for unit in self.engine.units:
            self.engine.free(unit)  # its outputs, or some of them, were not part of this backward
            if unit.phase is not Phase.IDLE:
                unit.phase = Phase.FORWARD  # another graph may yet come through it

    def _ensure_backward(self, training: bool | None) -> None:
        """Have autograd call us when this backward ends. Any unit may be the first to be reached,
        not only the root's: the loss may come from a part of the model.

        Args:
            training: the mode that its graph was made in.
        """
        if self.in_backward:
            return
        self._forget_dead_backward()
        if training is not self.training:  # an evaluation came between, perhaps in full precision
            self.training = training
            for unit in self.engine.units:
                self.engine.free(unit)
                unit.choose_precision(training)  # for what checkpoints will run again
        callback = self.end_of_backward
        Variable._execution_engine.queue_callback(callback)
        self._backward = weakref.ref(callback)  # to this bound method, which autograd holds
        self.prefetcher.start_backward()
        self.lockstep.at(Moment.START_OF_A_BACKWARD_BELOW, self.engine.root)
        for unit in self.engine.units:
            check_waiting_gradient(unit)
        self.lockstep.agree(_use, self.synchronizes)
        if self.lockstep.apart:  # once they go different ways, nothing may be gathered any more
            for unit in self.engine.units:
                self.engine.gather(unit)

    def _prefetch_in_backward(self, target: Unit | None) -> None:
        if not self.lockstep.apart:
            self.engine.prefetch(target)

    def _done_with(self, unit: Unit) -> None:
        if not self.lockstep.apart:
            self.engine.free(unit)

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


def _use(unit: Unit) -> Use:
    """What the backward that has just begun will have for a unit, on this rank."""
    # torch's own multi-grad hooks ask the engine the same question.
    if any(torch._C._will_engine_execute_node(node) for node in unit.accumulators):
        return Use.GRADIENT
    return Use.WAITING if unit.waiting is not None else Use.NONE

"""When: the moments of a training step at which the engine acts.

A step of plain PyTorch is two calls, ``model(x)`` and ``loss.backward()``. FSDP has to get a word
in between the layers of both, and there are five places for it::

    pre-forward     before a unit's module runs           gather its parameters
    post-forward    after it                              free them
    pre-backward    when a gradient first reaches one     gather them again
                    of the module's outputs, or
                    autograd needs a parameter
    post-backward   when the gradient of ``unit.unsharded.flat_param``    free them, reduce the
    gradient
                    is complete
    end of          after the last operation of the       collect what is still under way,
    backward        whole backward                        give the optimizer its gradients

The first two are here, the other three in backward.py. Both say only *when*. What is done is told
in unshard.py, reshard.py and reduce.py, what next in prefetch.py, how many at once in limiter.py,
whether all ranks do the same in rank_agreement.py.

The outputs are what prefetching goes by: they come first, in every ordinary model. What autograd
has saved is what nothing can get around (saved_tensors.py): a module may hand on tensors in ways
that nobody sees, but no gradient of it can be computed without what it has saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minifsdp.backward import Backward
from minifsdp.between_steps.state_dict_calls import StateDictCalls
from minifsdp.checks.rank_agreement import Moment
from minifsdp.engine import Engine
from minifsdp.precision import output_cast, prepare_inputs
from minifsdp.support.autograd_hooks import after_gradients_of, before_gradient_of
from minifsdp.support.param_views import (
    check_untouched,
    make_views,
    use_sharded_views,
    use_unsharded_views,
    values,
)
from minifsdp.support.pytree import tensors_in
from minifsdp.support.saved_tensors import Call, refuse_transforms
from minifsdp.unit import Unit
from minifsdp.unit_state import TrainingState
from minifsdp.unshard import wait_for_unshard


class Hooks:
    """The hooks of all units below one root, around their forwards."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.agreement = engine, engine.agreement
        self.backward = Backward(engine)
        self.depth = 0  # of forwards within forwards
        self.calls = self.backward.calls  # those forwards, outermost first
        self.summoned: set[Unit] = set()  # their parameters are out, between steps (full_params.py)
        self.state_dict_calls = StateDictCalls()

    @property
    def idle(self) -> bool:
        """Between steps."""
        return self.depth == 0 and not self.backward.running

    def check_root_and_idle(self, unit: Unit, method: str) -> None:
        """Refuse to do between steps, for all units, what was asked for elsewhere.

        Raises:
            RuntimeError: ``unit`` is not the root's; or a forward or backward is under way.
        """
        if unit is not self.engine.root:
            raise RuntimeError(
                f"{method} was called on unit {unit.label}, which is inside of another. Call it on "
                f"the outermost FullyShardedDataParallel: it concerns all units together."
            )
        if not self.idle:
            raise RuntimeError(f"{method} was called in a forward or backward; call it between.")

    @property
    def _outermost(self) -> bool:
        """In a forward that is not part of another, nor of a backward."""
        return self.depth == 1 and not self.backward.running

    def forward(
        self,
        unit: Unit,
        module: Callable[..., Any],
        training: bool,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """The forward of a unit's module, with its parameters gathered for as long as it runs.

        Args:
            training: the module's mode; the outermost one's counts.
        """
        if self.state_dict_calls.held:
            self.state_dict_calls.close_aborted()
        if self.summoned:
            self._check_summoned(unit)
            if unit in self.summoned:
                return module(*args, **kwargs)
        self.depth += 1
        first = torch._C._autograd._get_sequence_nr()  # of the operations to come
        try:
            as_given = output_cast(unit, args, kwargs)
            args, kwargs = self.pre_forward(unit, training, args, kwargs)
            try:
                with self.backward.saved.hooks():
                    output = module(*args, **kwargs)
            except RuntimeError as error:
                refuse_transforms(unit, error)
                if unit.uses_unsharded_views:  # perhaps because of a parameter that was changed
                    check_untouched(unit, self.calls[-1].values, failed=True)
                raise
            if as_given is not None:
                output = as_given(output)
            self.post_forward(unit, output, first)
        except BaseException:
            self.forward_failed(unit)
            raise
        finally:
            self.depth -= 1
            del self.calls[self.depth :]
        return output

    def pre_forward(
        self, unit: Unit, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module is about to run. Its parameters have to be there, as views known to autograd.

        Returns:
            What the module should be called with.
        """
        if self._outermost and not self.summoned:
            self.backward.forget_the_dead()
            self.engine.start(training)
            self.agreement.begin()
            self.engine.prefetcher.start_forward()
        if unit.needs_unshard or not self.backward.running:  # else it is nobody else's business
            self.agreement.at(Moment.FORWARD_OF, unit)
        self.engine.prefetcher.needed(unit)
        self.engine.gather(unit)
        if self._in_order:
            self.engine.prefetch(self.engine.prefetcher.pre_forward(unit))
        wait_for_unshard(unit)
        make_views(unit)
        use_unsharded_views(unit)
        before = values(unit, thoroughly=self.agreement.compares(unit))
        version = unit.sharded_flat_param._version
        self.calls.append(Call(unit, unit.unsharded, version, before, self.engine.training))
        self.backward.saved.uses(tuple(self.calls))
        if (
            unit.needs_unshard
            and not unit.sharded_flat_param.requires_grad
            and torch.is_grad_enabled()
        ):
            self._free_when_inputs_have_gradients(unit, args, kwargs)
        # Also where a checkpoint around the root runs it again, which is then not the outermost.
        is_root = unit is self.engine.root or self._outermost
        return prepare_inputs(unit, is_root, args, kwargs)

    def post_forward(self, unit: Unit, output: object, first: int) -> None:
        """The module has run. Free its parameters, and see that the backward finds them again.

        Args:
            first: number of the first operation that autograd may have recorded in it.

        Raises:
            RuntimeError: it has changed or replaced a parameter.
        """
        check_untouched(unit, self.calls[-1].values)
        if torch.is_grad_enabled():
            unit.state.run_forward()
            hook = partial(self.backward.pre_backward, tuple(self.calls))
            for tensor in tensors_in(output):
                before_gradient_of(tensor, hook, first)
        if not self._stays(unit):
            self.engine.done_with(unit)
        elif unit.state.training is not TrainingState.PRE_BACKWARD:
            use_sharded_views(
                unit
            )  # kept for the backward, not for anybody who looks at the model till then
        if self._in_order:
            self.engine.prefetch(self.engine.prefetcher.post_forward(unit))
        if self._outermost:
            self.agreement.at(Moment.END_OF_FORWARD_OF, unit)
            for other in self.engine.units:  # prefetched for a forward that did not come
                if not self._stays(other) and other not in self.summoned:
                    self.engine.free(other)

    def forward_failed(self, unit: Unit) -> None:
        """The module raised. Leave everything so that the next forward finds it in order."""
        if self._outermost and not self.summoned:
            self.agreement.failed()
            self.engine.reset()
            self.engine.prefetcher.forget()
        elif unit.state.training is not TrainingState.PRE_BACKWARD and not self.agreement.diverged:
            # Only this one: its caller may catch the exception, whose traceback may hold views.
            self.engine.free(unit)

    def _stays(self, unit: Unit) -> bool:
        """Whether the unit keeps its parameters when its forward ends."""
        if unit.state.training is TrainingState.PRE_BACKWARD:
            return True  # checkpointing: its backward is under way, and computes with them
        if not torch.is_grad_enabled() or unit.state.training is not TrainingState.FORWARD:
            return False  # no backward will come for them
        # The root's backward comes right after its forward: freeing it would gain nothing.
        return unit is self.engine.root or not unit.reshard_after_forward

    @property
    def _in_order(self) -> bool:
        """Whether forwards come as in a step: none of a checkpoint that runs one again, and none of
        an evaluation inside of summon_full_params."""
        return not self.backward.running and not self.summoned

    def _check_summoned(self, unit: Unit) -> None:
        """Refuse to train inside of summon_full_params."""
        if torch.is_grad_enabled() and any(
            u.sharded_flat_param.requires_grad for u in self.engine.units
        ):
            raise RuntimeError(
                f"unit {unit.label} was called inside summon_full_params with gradients enabled. "
                f"They would reach parameters that are there for the time of the block only. Leave "
                f"the block first, since forward gathers by itself; or use torch.no_grad()."
            )

    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit gets no gradient, so no post-backward. It is done with when its inputs have
        # theirs; where they get none, it waits for the end of the backward.
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]

        def free(grads: object) -> None:
            unit.state.complete_grad()
            self.engine.done_with(unit)

        after_gradients_of(inputs, free)

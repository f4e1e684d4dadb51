"""When: the five moments of a training step, and the two of them that belong to the forward.

A step of plain PyTorch is two calls, ``model(x)`` and ``loss.backward()``. FSDP acts between the
layers of both, at five moments::

    before forward     before a unit's module runs             gather its parameters
    after forward      after it has run                        free them
    before backward    when the first gradient reaches an      gather them again
                       output of the module, or autograd
                       needs a parameter that it has saved
    after gradient     when the unit's gradient is complete    free them, reduce the gradient
    end of backward    after autograd's last operation         wait for all reductions, and give
                                                               the optimizer its gradients

The first two are here: they surround a call of the module. The other three are in backward.py,
because autograd calls them. Both files only say *when*. What is done is in the method of the same
name in engine.py.

Why the output and the saved parameters? Every ordinary model uses a unit's outputs, and their
gradient comes early enough for prefetching. But a module may also hand on tensors in ways that
cannot be seen (an attribute, a closure). Then the hook on saved parameters still comes, because no
gradient can be computed without what autograd has saved (support/saved_tensors.py).
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from minifsdp.backward import Backward
from minifsdp.between_steps.state_dict_calls import StateDictCalls
from minifsdp.checks.misplaced_calls import check_summoned, refuse_mixed
from minifsdp.checks.rank_agreement import Moment
from minifsdp.comm.transport import wait_for_readers
from minifsdp.engine import Engine
from minifsdp.precision import output_cast, prepare_inputs
from minifsdp.support.autograd_hooks import after_gradients_of, before_gradient_of
from minifsdp.support.dispatch_modes import without_modes
from minifsdp.support.listed_modules import LIST, starts
from minifsdp.support.param_views import (
    check_unreplaced,
    check_untouched,
    hide_divided_params,
    hides_params,
    show_divided_params,
    values,
)
from minifsdp.support.pytree import tensors_in
from minifsdp.support.saved_tensors import Call, refuse_transforms
from minifsdp.unit import Unit
from minifsdp.unit_state import BACKWARD, STRATEGY


class Hooks:
    """The forwards of all units below one root.

    Attributes:
        calls: the forwards that are running now, outermost first.
        summoned: units whose parameters are out between steps, and in which form of DTensors; None
            for full parameters. See between_steps/full_params.py.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.agreement = engine, engine.agreement
        self.backward = Backward(engine)
        self.calls, self.summoned = self.backward.calls, self.backward.summoned
        self.depth = 0  # of forwards within forwards
        self._threads: dict[str, int] = {}  # the one that runs the outermost of them
        self._graph_waits = False  # there was a forward before this one, and not yet its backward
        self.state_dict_calls = StateDictCalls()

    @property
    def idle(self) -> bool:
        """Whether no forward and no backward is running."""
        return self.depth == 0 and not self.backward.running

    def forward(
        self,
        unit: Unit,
        module: nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a unit's module, between its two moments.

        Args:
            module: of a list of modules the one that runs. The mode of the outermost one counts.
            run: what to call.
        """
        if self.state_dict_calls.held:
            self.state_dict_calls.close_aborted()
        if self.summoned:
            check_summoned(unit, self.engine.units, any(self.summoned.values()))
            if unit in self.summoned:
                return run(*args, **kwargs)
        if unit is self.engine.root or not self.depth:
            self._check_thread()
        self.depth += 1
        first = torch._C._autograd._get_sequence_nr()  # of the operations to come
        try:
            cast_output = output_cast(unit, args, kwargs)
            args, kwargs = self.before_forward(unit, module, args, kwargs)
            try:
                with self.backward.saved.hooks(module):
                    output = run(*args, **kwargs)
            except RuntimeError as error:
                refuse_transforms(unit, error)
                refuse_mixed(unit, self.engine.units, error)
                if unit.uses_unsharded_views:  # perhaps because of a parameter that was changed
                    check_untouched(unit, self.calls[-1].values, failed=True)
                raise
            if cast_output is not None:
                output = cast_output(output)
            self.after_forward(unit, output, first)
        except BaseException:
            self.forward_failed(unit)
            raise
        finally:
            self.depth -= 1
            del self.calls[self.depth :]
            if not self.depth:
                self._threads.clear()
        return output

    @without_modes
    def before_forward(
        self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module is about to run.

        Returns:
            The arguments to call it with: moved to the device and cast, where that is asked for.
        """
        if self._outermost and not self.summoned:
            self.backward.forget_failed()
            self._graph_waits = hides_params(self.engine.units)
            self.engine.start(module.training)
            if torch.is_grad_enabled():
                self.backward.begin_graph()
            else:
                hide_divided_params(self.engine.units)
            self.agreement.begin()
            self.engine.prefetcher.start_forward()
        if not unit.uses_unsharded_views:
            check_unreplaced(unit)
        if unit.unsharded.needs_unshard or not self.backward.running:  # else others are not asked
            self.agreement.at(Moment.FORWARD_OF, unit)
        self.engine.before_forward(unit, prefetch=self._in_order and LIST not in unit.reasons)
        if unit.is_list and self._in_order:
            starts(unit, module)
        before = values(unit, thoroughly=self.agreement.compares(unit))
        version = unit.sharded_flat_param._version
        self.calls.append(Call(unit, unit.unsharded, version, before, self.engine.training))
        self.backward.saved.uses(tuple(self.calls))
        frozen = not unit.sharded_flat_param.requires_grad
        if unit.unsharded.needs_unshard and frozen and torch.is_grad_enabled():
            self._free_when_inputs_have_gradients(unit, args, kwargs)
        # Also where a checkpoint around the root runs it again, which is then not the outermost.
        is_root = unit is self.engine.root or self._outermost
        return prepare_inputs(unit, is_root, args, kwargs)

    @without_modes
    def after_forward(self, unit: Unit, output: object, first: int) -> None:
        """The module has run. Its backward begins with a gradient of one of its outputs.

        Args:
            first: number of the first operation that autograd may have recorded in it.

        Raises:
            RuntimeError: it has changed or replaced a parameter.
        """
        check_untouched(unit, self.calls[-1].values)
        if torch.is_grad_enabled():
            hook = partial(self.backward.before_backward, tuple(self.calls))
            for tensor in tensors_in(output):
                before_gradient_of(tensor, hook, first)
        self.engine.after_forward(unit, prefetch=self._in_order and LIST not in unit.reasons)
        while self.backward.lent:
            self.engine.leave(self.backward.lent.pop())
        if self._outermost:
            self.agreement.at(Moment.END_OF_FORWARD_OF, unit)
            self.engine.end_of_forward()
            wait_for_readers()  # the program may change parameters now
            if not torch.is_grad_enabled() and not self._graph_waits:  # no backward will come
                show_divided_params(self.engine.units)

    @without_modes
    def forward_failed(self, unit: Unit) -> None:
        """The module has raised. Leave everything so that the next forward finds it in order."""
        if self._outermost and not self.summoned:
            wait_for_readers()  # the program may catch this, and change parameters
            self.backward.lent.clear()
            self.agreement.failed()
            self.engine.reset()
            self.engine.prefetcher.forget()
            if not self._graph_waits:
                show_divided_params(self.engine.units)
        else:  # only this one: its caller may catch the exception
            self.engine.leave(unit)

    def _check_thread(self) -> None:
        """Refuse a forward beside one, or beside a backward, that another thread runs.

        Raises:
            RuntimeError: there is one.
        """
        if torch._C._current_graph_task_id() >= 0:
            return  # in a backward, which may run parts of a forward, perhaps in autograd's thread
        thread = threading.get_ident()
        beside = self.backward.running and not self.depth
        # In one operation, so that of two threads that come at the same time one is refused.
        if beside or self._threads.setdefault("forward", thread) != thread:
            raise RuntimeError(
                f"this model (root: {type(self.engine.root.module).__name__}) runs in another "
                f"thread at the same time. Its units are gathered and freed in one order, for one "
                f"forward or backward at a time. Let the threads take turns, with a "
                f"threading.Lock() around forward and backward, or give each thread a model and a "
                f"process group of its own."
            )

    @property
    def _outermost(self) -> bool:
        """In a forward that is not part of another, nor of a backward."""
        return self.depth == 1 and not self.backward.running

    @property
    def _in_order(self) -> bool:
        """Whether this forward comes in the order of a step: not in a checkpoint that runs a part
        again, and not in an evaluation inside of summon_full_params."""
        return not self.backward.running and not self.summoned

    def _free_when_inputs_have_gradients(self, unit: Unit, args: object, kwargs: object) -> None:
        # A frozen unit has no gradient of its own to wait for. Its backward is over when its inputs
        # have theirs; where they get none, the unit is freed at the end of the whole backward.
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]

        @without_modes
        def free(grads: object) -> None:
            unit.state.complete_grad()
            unit.let_go(BACKWARD, STRATEGY)

        after_gradients_of(inputs, free)

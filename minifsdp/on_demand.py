"""On demand: a unit is gathered whenever somebody needs it, and freed as soon as nobody does.

The moments of hooks.py follow the calls of modules. Programs do more than call modules: a loss may
come from an attribute that a module has kept, an activation checkpoint runs a part of a unit again,
a module computes with the weights of a module inside of it. So there are two more signs that a unit
is needed, and two that it is not::

    autograd asks for a parameter that it has saved       gather the unit    saved_tensors.py
    a module asks for a parameter and finds a placeholder gather the unit    param_access.py
    nothing is left that autograd has saved of the unit   free it early      unsharded_storage.py
    no output of a frozen unit needs a gradient           free it early      in this file

These belong together: a checkpoint may need a unit that was freed early, and what gathers on demand
has to notice that its memory is gone.
"""

from contextlib import AbstractContextManager
from weakref import ref

import torch

from minifsdp.checks.param_changes import check_unreplaced
from minifsdp.checks.rank_agreement import Moment, RankAgreement
from minifsdp.core.layers import Call, Chain, Layer
from minifsdp.core.outputs import tensors_in
from minifsdp.core.reshard import reshard
from minifsdp.core.streams import Event
from minifsdp.core.unit_state import BACKWARD, STRATEGY, Purpose, ShardedState
from minifsdp.core.unshard import wait_for_unshard
from minifsdp.core.views import hide_views, show_views
from minifsdp.dispatch_modes import without_modes
from minifsdp.featured_hooks import FeaturedHooks
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.saved_tensors import SavedParameters


class OnDemand(Layer):
    """Gathers and frees the units of one root beside the order of their moments.

    Attributes:
        saved: what autograd has saved of parameters.
        lent: units that were gathered in a forward for the module around them.
        graphs: forwards with gradients since the last backward.
        frees_early: whether it frees units early; set to False to compare.
    """

    frees_early = True

    def __init__(self, hooks: FeaturedHooks, agreement: RankAgreement) -> None:
        self.hooks, self.agreement = hooks, agreement
        self.engine, self.backward = hooks.engine, hooks.backward
        self.saved = SavedParameters(self.gather)
        self.lent: list[FeaturedUnit] = []
        self.graphs = 0
        # Units that were freed early. For the limiter they stay alive until their gradient is
        # complete: otherwise it would wait for the device before the next unit is gathered.
        self._freed_early: dict[FeaturedUnit, Event] = {}
        self._needed_again = set[FeaturedUnit]()  # of these, the ones that were gathered again
        self._frozen: FeaturedUnit | None = None  # the last one whose backward began
        for unit in self.engine.units:
            unit.on_demand = self.on_demand

    def start(self, purpose: Purpose) -> None:
        """A forward with gradients begins. New marks tell what its graph saves of parameters from
        what earlier graphs have saved."""
        if purpose is not Purpose.LOOK and torch.is_grad_enabled():
            self.graphs += 1
            for unit in self.engine.units:
                unit.unsharded.saved = [object()]

    def before_forward(self, call: Call) -> None:
        """In a backward, a checkpoint may run a unit again that was freed early."""
        call.notes["gradients"] = torch.is_grad_enabled()
        call.unit.kept_views = []  # a forward has new views, also in a backward
        if call.unit in self._freed_early:
            self.freed(call.unit)

    def gathered(self, call: Call) -> None:
        """Somebody may keep the views of this call for its backward (support/param_views.py)."""
        if call.notes["gradients"]:
            call.notes["views"] = [*map(ref, call.unit.views)]

    def around_forward(self, call: Call) -> AbstractContextManager[object]:
        """Saves parameters as descriptions: those of this unit that are saved from now on belong to
        this call."""
        return self.saved.hooks(tuple(self.hooks.calls))

    def after_forward(self, call: Call, output: object) -> object:
        """What was lent to the module is not needed any more."""
        while self.lent:
            self.engine.leave(self.lent.pop())
        return output

    def failed(self) -> None:
        """Units that were lent are freed with all others."""
        self.lent.clear()

    def before_backward(self, call: Call) -> None:
        """Units around this one may not be needed any more, nor the frozen one before it. (A unit
        without parameters tells nothing: ranks need not agree on whether its backward runs.)"""
        unit = call.unit
        self.saved.began[unit] = call
        unit.kept_views = call.notes.get("views", [])
        if not self.frees_early or not unit.numel:
            return
        for outer in unit.ancestors:
            self._free_early(outer)
        if self._frozen is not None and self._frozen not in unit.ancestors:
            self._end_of_frozen(self._frozen)
        self._frozen = None if unit.sharded_flat_param.requires_grad else unit

    def again(self, call: Call) -> None:
        """The unit is there, for this call as well."""
        unit = call.unit
        self.saved.began[unit] = call
        unit.kept_views = call.notes.get("views", [])
        if unit.shows_views:
            show_views(unit)

    def end_of_backward(self) -> None:
        """The graphs are gone, or will be gone through again."""
        self.graphs = 0
        for unit in self.engine.units:
            unit.kept_views = []

    broken = end_of_backward

    def gather(self, calls: Chain) -> None:
        """Autograd needs a parameter of the last of the calls, also if its unit was freed early.

        Raises:
            RuntimeError: no backward is running.
        """
        check_in_backward()
        self.backward.before_backward(calls)
        unit = calls[-1].unit
        if not unit.shows_views:
            self.agreement.at(Moment.BACKWARD_OF, unit)
            self._unshard_again(unit)

    @without_modes
    def on_demand(self, unit: FeaturedUnit) -> bool:
        """A module asks for a parameter that is sharded. In a backward this is the recomputation
        of an activation checkpoint: autograd has saved nothing of what is in it, and the gradient
        may not have come through the outputs of the unit. In a forward without gradients it is a
        module, such as ``nn.TransformerEncoderLayer``, that computes with the parameters of a
        module inside of it without a call. (With gradients they would have to belong to a call.)

        Returns:
            Whether the unit is gathered now.
        """
        chain = self.saved.last.get(unit)
        if chain is not None and torch._C._current_graph_task_id() >= 0:
            self.gather(chain)
        elif self._lends and not unit.shows_views:
            check_unreplaced(unit)
            self.agreement.at(Moment.FORWARD_OF, unit)
            self.engine.before_forward(unit, prefetch=False)
            self.lent.append(unit)
        return unit.shows_views

    @property
    def _lends(self) -> bool:
        """Whether a forward is running that began without gradients. That they are off now is not
        enough: they are off also where autograd saves a tensor, and in the forward of an
        autograd.Function. A unit that is lent there would silently get no gradient."""
        calls = self.hooks.calls
        if not calls or calls[-1].notes["gradients"] or torch.is_grad_enabled():
            return False
        return not self.backward.running

    def _free_early(self, unit: FeaturedUnit) -> None:
        """The backward has come to a unit inside of this one. If nothing that is saved of this one
        is left, free it; its gradient is complete much later. This is so for most roots: the head's
        backward is over, and an embedding's backward needs no parameter."""
        if not self._is_done_with(unit):
            return
        hide_views(unit)  # modules refer to the others, too
        if unit.unsharded.is_in_use(unit.views):
            show_views(unit)
        else:
            self._freed_early[unit] = reshard(unit, self.engine.streams)
            self.engine.stats.count_free(unit)

    def _end_of_frozen(self, unit: FeaturedUnit) -> None:
        """The backward has come to the unit after this frozen one. If nothing that is saved of the
        frozen unit is left, its backward is over. As a rule its inputs have told that already, but
        not if one of several is a leaf (core/autograd_hooks.py), such as a prompt that is tuned."""
        if self._is_done_with(unit):
            self.hooks.inputs_have_gradients(unit, None)

    def _is_done_with(self, unit: FeaturedUnit) -> bool:
        """Whether the unit's backward has begun, and nothing that is saved of the unit is left.

        False if there may be another graph, which the program has dropped. Python's collector frees
        that at a different time on each rank, but all ranks have to free units alike."""
        if unit.state.sharded is not ShardedState.UNSHARDED or BACKWARD not in unit.reasons:
            return False
        if not unit.reasons <= {BACKWARD, STRATEGY} or unit in self._needed_again:
            return False
        return self.graphs == 1 and not unit.unsharded.is_saved

    def _unshard_again(self, unit: FeaturedUnit) -> None:
        """Gather a unit that was freed early and is needed again in this backward: an activation
        checkpoint inside of the unit runs a part of it again. From now on the unit is not freed
        early, also in later backwards; else every such checkpoint would gather it."""
        self._needed_again.add(unit)
        self.freed(unit)
        self.engine.parameters.unshard(unit, BACKWARD)
        wait_for_unshard(unit)
        show_views(unit)

    def freed(self, unit: FeaturedUnit) -> None:
        """Tell the limiter that a unit is freed, if it was freed early."""
        if unit in self._freed_early:
            self.engine.limiter.freed(unit, self._freed_early.pop(unit))


class Unreached(Layer):
    """Frees frozen units after a forward if no gradient will reach them, since no backward of
    theirs would: a reference model that is not run in ``no_grad``, or the layers below the first
    trained one. This layer exists only in models that have a frozen unit from the beginning."""

    def __init__(self) -> None:
        self._reached: dict[FeaturedUnit, bool] = {}  # of this forward: may a gradient reach it?

    def start(self, purpose: Purpose) -> None:
        """Forget what a forward that has failed, or a checkpoint in a backward, has left."""
        self._reached.clear()

    def after_forward(self, call: Call, output: object) -> object:
        """A unit may run several times, and then all of its outputs count."""
        unit = call.unit
        if unit.numel and not unit.sharded_flat_param.requires_grad and not self._reached.get(unit):
            self._reached[unit] = any(tensor.requires_grad for tensor in tensors_in(output))
        return output

    def end_of_forward(self, unit: FeaturedUnit) -> None:
        """Free them. If a gradient comes after all (a loss was in an attribute), gather again."""
        for frozen, reached in self._reached.items():
            if not reached:
                frozen.let_go(STRATEGY)


def check_in_backward() -> None:
    """Raises RuntimeError: something that autograd has saved is read while no backward runs."""
    if torch._C._current_graph_task_id() < 0:
        raise RuntimeError(
            "a parameter that autograd has saved was asked for outside of a backward. It is "
            "sharded then; read it inside of FSDP.summon_full_params(model)."
        )

"""What the units of one root share, and what happens to a unit at the five moments of a step.

hooks.py and backward.py know *when* a moment has come, and call the method of the same name here.
Each method is a few lines. It gathers parameters and frees them (parameters.py), asks which unit
comes next (prefetch.py), and sends gradients on their way (gradients.py):

- **Before forward.** Start to gather the unit. Start to gather what comes next; the computation
  does not wait for that one. Let it wait for this unit. Make new views for the module.
- **After forward.** Free the unit, unless its backward comes soon (STRATEGY).
- **Before backward.** As in the forward, but without new views: the graph has those of the forward,
  and they show the same memory. (Backward frees units around this one whose parameters autograd
  does not need any more: the root, as a rule, since its head's backward is over.)
- **After gradient.** Free the unit first, so that what is gathered next can have its memory. Gather
  what comes next. Start to reduce the gradient.
- **End of backward.** Free what is still there: a unit whose outputs had no part in the loss, for
  example. Wait for all reductions, and give the optimizer its gradients.

To free a unit is to let go of the reason of this moment; it stays if there is another reason
(unit_state.py).
"""

import torch
from torch import Tensor

from minifsdp.api import Stats
from minifsdp.checks.held_values import check_held
from minifsdp.checks.members import check_lists, check_tree
from minifsdp.checks.on_meta import check_on_meta
from minifsdp.checks.rank_agreement import DIVERGED, RankAgreement
from minifsdp.comm.pieces import Pieces
from minifsdp.comm.transport import wait_for_readers
from minifsdp.gradients import Gradients
from minifsdp.limiter import Limiter
from minifsdp.no_sync import NO_SYNC, NoSync, check_unreduced_grad, is_kept
from minifsdp.parameters import Parameters
from minifsdp.post_forward import keep_post_forward_shard
from minifsdp.prefetch import Prefetcher
from minifsdp.strategies import choose_strategies
from minifsdp.streams import Streams
from minifsdp.support.listed_modules import LIST, close
from minifsdp.support.param_views import make_views, use_sharded_views, use_unsharded_views
from minifsdp.support.shard_changes import check_on_host, common_device, follow_changes
from minifsdp.support.unsharded_storage import UnshardedFlatParam
from minifsdp.unit import Unit
from minifsdp.unit_state import BACKWARD, FORWARD, PREFETCH, STRATEGY
from minifsdp.unshard import wait_for_unshard


class Engine:
    """All units below one root.

    Args:
        units: the root's first, then in the order of ``named_modules()``.
    """

    def __init__(self, units: list[Unit], limiter: Limiter, prefetcher: Prefetcher) -> None:
        self.units, self.root = units, units[0]
        self.limiter, self.prefetcher, self.stats = limiter, prefetcher, Stats()
        self.agreement = RankAgreement(
            units,
            f"limit_all_gathers={getattr(limiter, 'limit', False)}, "
            f"backward_prefetch={prefetcher.backward}, forward_prefetch={prefetcher.forward}",
        )
        self.sharded = any(unit.shard_group is not None for unit in units)  # not all replicated
        self.training: bool | None = None  # the mode of the outermost module, last time it ran
        self.streams = Streams.on(torch.device("cpu"))  # till the first forward
        self.parameters = Parameters(units, self.streams, limiter, prefetcher, self.stats)
        self.gradients = Gradients(self.streams, self.stats)
        self.no_sync = NoSync(units)
        choose_strategies(units, self.streams)

    def start(self, training: bool | None) -> None:
        """Be ready for a forward: nothing left from the last one, everything as the user wants it.

        Args:
            training: the mode of the outermost module. None: not for a forward, but to look at
                parameters.

        Raises:
            ValueError: a shard was replaced by one of another size; units on several devices; ranks
                with different units.
            RuntimeError: parameters were moved, or stepped, when they should not have been.
        """
        if not self.agreement.steps:
            check_tree(self.root.module)
            check_lists(self.units)
            for unit in self.units:
                if unit.offload_from is not None:
                    check_on_host(unit)
            check_on_meta(self.root.module)
            check_held(self.root.module)
        self.reset(keep=training is not None and training is self.training)
        self.training = self.training if training is None else training
        device = common_device(self.units)
        if device is not None:
            self._compute_on(device)
        for unit in self.units:
            follow_changes(unit)
            unit.choose_precision(training)
            check_unreduced_grad(unit)
        if training is not None or self.sharded:
            self.agreement.start(forward=training is not None)
        # The gathers to come must send what the optimizer has just written.
        self.streams.unshard.wait_event(self.streams.compute.record_event())

    def _compute_on(self, device: torch.device) -> None:
        if device != self.streams.device:
            self.streams = Streams.on(device)
            self.parameters.streams = self.gradients.streams = self.streams
            choose_strategies(self.units, self.streams)
        self.prefetcher.adapt_to(self.streams.host_runs_ahead)

    def compute_as(self, training: bool | None) -> None:
        """Have everything in the precision of this mode, for what a backward will run again."""
        if training is not self.training:
            self.training = training
            for unit in self.units:
                self.parameters.reshard(unit)
                unit.choose_precision(training)

    def reset(self, keep: bool = False) -> None:
        """Drop what a failed forward or backward has left, and what a forward without one keeps.

        Args:
            keep: what a backward in no_sync has left gathered, if nobody has changed it since.
        """
        self.agreement.reset()
        self.gradients.drop()
        for unit in self.units:
            if LIST in unit.reasons:
                close(unit)
            if unit.reasons:  # else it is freed already
                kept = keep and is_kept(unit)
                unit.reasons.clear()
                if kept:
                    unit.hold(NO_SYNC)
                else:
                    self.parameters.reshard(unit)
            unit.source = unit.own_source  # an optimizer may have stepped
            unit.state.start_step()
            unit.view_maker.drop_gradient(unit)
            unit.has_unused = False

    # ---------------------------------------------------------------- the five moments of a step

    def before_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module is about to run: give it its parameters, as views known to autograd.

        Args:
            prefetch: this forward is part of a step, whose order tells what comes next.
        """
        self.prefetcher.needed(unit)
        self.parameters.unshard(unit, FORWARD)
        if prefetch:
            self.parameters.prefetch(self.prefetcher.pre_forward(unit))
        wait_for_unshard(unit)
        if LIST not in unit.reasons:  # else those of the first module of its list are still good
            make_views(unit)
        use_unsharded_views(unit)

    def after_forward(self, unit: Unit, prefetch: bool) -> None:
        """The module has run. If a backward may follow, hold the unit for it, if that is the unit's
        strategy. Free it otherwise, and gather what comes next."""
        if torch.is_grad_enabled():
            unit.state.run_forward()
            # The root's backward comes right after its forward: freeing it would gain nothing.
            if unit is self.root or not unit.reshard_after_forward:
                unit.hold(STRATEGY)
            elif unit.reasons == {FORWARD}:
                keep_post_forward_shard(unit, self.streams)
        self.leave(unit)
        if prefetch:
            self.parameters.prefetch(self.prefetcher.post_forward(unit))

    def leave(self, unit: Unit) -> None:
        """The unit's module runs no more, also because it has raised. A unit that stays gets its
        sharded views, because parameters() must not list views between steps; not so in its own
        backward, where an activation checkpoint may run another part of it."""
        if BACKWARD not in unit.reasons:
            use_sharded_views(unit)
        unit.let_go(FORWARD)

    def end_of_forward(self) -> None:
        """The outermost module has run. Free what was gathered ahead for a forward that did not
        come and, without gradients, what was held for a backward that will not."""
        over = {PREFETCH} if torch.is_grad_enabled() else {PREFETCH, STRATEGY}
        for unit in self.units:
            if LIST in unit.reasons:
                close(unit)
            if unit.reasons & over:
                unit.let_go(*over)

    def start_backward(self) -> None:
        """A backward begins, and ranks have agreed on what they do in it."""
        self.no_sync.start_backward()
        for unit in self.units if self.agreement.diverged else ():
            self.parameters.unshard(unit, DIVERGED)  # others may not be there to gather with later

    def before_backward(self, unit: Unit, unsharded: UnshardedFlatParam, graph_task: int) -> None:
        """The first gradient has reached the unit: gather its parameters again.

        Args:
            unsharded: what the forward has computed with, perhaps in another precision.
            graph_task: autograd's number of this backward.
        """
        self.prefetcher.needed(unit)
        if unit.unsharded is not unsharded:
            self.parameters.reshard(unit)
            unit.compute_with(unsharded)
        self.parameters.unshard(unit, BACKWARD)
        unit.state.start_backward(graph_task)
        self.parameters.prefetch(self.prefetcher.pre_backward(unit))
        wait_for_unshard(unit)
        use_unsharded_views(unit)  # activation checkpointing runs parts of a forward again in here

    def after_gradient(self, unit: Unit, grad: Tensor | Pieces) -> None:
        """The gradient of the unit, ``[padded_numel]``, is complete: free its parameters, reduce
        the gradient. If it is a tensor nobody else may hold it."""
        unit.state.complete_grad()
        unit.source = unit.own_source
        unit.let_go(BACKWARD, STRATEGY)
        self.parameters.prefetch(self.prefetcher.post_backward(unit))
        if unit.numel:
            self.gradients.take(unit, grad)

    def end_of_backward(self) -> None:
        """Every unit is sharded again, every gradient where the optimizer looks for it.

        Two kinds of units stay: those in no_sync, for the next forward, and those whose forward is
        still running, if it has called torch.autograd.grad. If the ranks had diverged, each has
        recorded another pre-backward order: forget it.
        """
        for unit in self.agreement.late:
            self.gradients.reduce_held(unit)
        for unit in self.units:
            if FORWARD not in unit.reasons:
                use_sharded_views(unit)
            unit.let_go(BACKWARD, STRATEGY, PREFETCH, DIVERGED)  # if its outputs had no gradient
            unit.source = unit.own_source
            unit.state.end_backward()
        wait_for_readers()  # an optimizer may be about to write to the shards
        self.gradients.finish()
        if self.agreement.diverged:
            self.prefetcher.pre_backward_order.forget()  # every rank has seen another one
        self.agreement.end_backward()

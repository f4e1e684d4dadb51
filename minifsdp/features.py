"""The layers of minifsdp, in their order: what surrounds the engine of one root.

layers.py says what a layer is, and which moments there are. The order matters where two layers have
something to do at the same moment; a line here says why one comes before another. A feature that a
root does not use has no layer, and costs nothing.
"""

from collections.abc import Iterator

from minifsdp.between_steps.idle import Readers, ShownParams
from minifsdp.between_steps.state_dict_calls import StateDictCalls
from minifsdp.checks.first_step import FirstStep
from minifsdp.checks.members import Leaks
from minifsdp.checks.misplaced_calls import OneThread, RefusedOperations, Summoned
from minifsdp.checks.param_changes import Unchanged, Unreplaced, Untouched
from minifsdp.checks.params_in_graphs import ParamsInGraphs
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.checks.same_launches import SameLaunches
from minifsdp.core.layers import Layer
from minifsdp.featured_hooks import FeaturedHooks
from minifsdp.no_sync import NoSync
from minifsdp.on_demand import OnDemand, Unreached
from minifsdp.post_forward import PostForward
from minifsdp.precision import CastBack, Precision, PrecisionByMode
from minifsdp.support.broken_backward import BrokenBackward
from minifsdp.support.grad_hooks import GradientHooks
from minifsdp.support.listed_modules import Lists
from minifsdp.support.marked_views import UnusedParams
from minifsdp.support.prefetch_stats import Mistargets
from minifsdp.support.several_forwards import SeveralForwards
from minifsdp.support.shard_changes import ShardChanges


def layers_of(hooks: FeaturedHooks) -> Iterator[Layer]:
    """The layers for one root."""
    engine = hooks.engine
    units = engine.units
    no_sync = NoSync(engine)
    several = SeveralForwards(engine)
    agreement = RankAgreement(hooks, no_sync, several)
    # Between steps. A state dict that an exception has ended is put away before anybody is told
    # that parameters are out.
    yield OneThread(hooks)
    yield StateDictCalls()
    yield Summoned(hooks)
    yield BrokenBackward(hooks)
    # What a program has done since the last step, before anything is gathered or sent. no_sync
    # frees units whose shards have changed, before these are followed.
    yield FirstStep(engine, agreement)
    yield no_sync
    yield ShardChanges(engine)
    if any(unit.precision.cast_forward_inputs for unit in units):
        yield CastBack()
    by_mode = any(unit.precision.full_precision_in_eval for unit in units)
    yield PrecisionByMode(engine) if by_mode else Precision(engine)
    yield Mistargets(engine)  # looks which units are not gathered yet
    if any(unit.mesh is not None for unit in units):
        yield ShownParams(units)
    # A parameter that was replaced is this rank's own affair: it raises before others are asked.
    yield Unreplaced()
    yield agreement
    yield several  # it has looked ahead for the agreement
    yield SameLaunches(engine)
    if any(unit.mesh is not None for unit in units):
        yield UnusedParams(units)  # also of what ranks that differ have reduced at the end
    if any(unit.is_list for unit in units):
        yield Lists(units)
    if any(unit.post_forward_lines is not None for unit in units):
        yield PostForward(engine)
    # Checks of a unit that is gathered, or is about to be.
    yield Unchanged()
    yield OnDemand(hooks, agreement)
    if any(unit.numel and not unit.sharded_flat_param.requires_grad for unit in units):
        yield Unreached()
    yield Untouched(agreement)
    yield RefusedOperations(hooks)
    yield ParamsInGraphs(hooks.backward)
    yield Leaks()
    # Control returns to the program. The user's hooks are last: one may be an optimizer, which
    # must not write to what other ranks still read.
    yield Readers(engine)
    yield GradientHooks()

"""stats.py: what a root counts."""

import pytest

from minifsdp import BackwardPrefetch
from minifsdp.core.unit_state import ShardedState
from tests.ranks import on_ranks
from tests.small import stack, step

SETTINGS = {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE, "forward_prefetch": True}


@on_ranks(2)
def test_a_step_is_counted():
    model = stack(**SETTINGS)
    stats, units = model.engine.stats, model.engine.units
    step(model)
    assert stats.all_gathers == 2 * len(units) - 1, "each twice, and the root once"
    assert stats.reductions == len(units)
    before = stats.prefetches
    assert before == 4, "the first forward knows no order; the backward has one"
    step(model)
    assert stats.prefetches == before + 4 + 4
    assert stats.declined_prefetches == 0
    assert stats.unsharded_units == stats.unsharded_bytes == 0


@on_ranks(2)
def test_the_peak_is_the_most_at_one_time():
    model = stack(**SETTINGS)
    stats, units = model.engine.stats, model.engine.units
    step(model)
    assert stats.peak_unsharded_units == 2, "the root, and a unit; nothing is known to be next"
    step(model)
    assert stats.peak_unsharded_units == 3, "the root, a unit, and the one that is next"
    assert stats.peak_unsharded_bytes == sum(unit.unsharded.nbytes for unit in units[:3])


@on_ranks(2)
def test_where_there_is_no_room_a_prefetch_is_declined():
    model = stack(limit_all_gathers=1, **SETTINGS)
    stats = model.engine.stats
    step(model)
    step(model)
    assert stats.prefetches + stats.declined_prefetches == 12 and stats.declined_prefetches > 0
    assert stats.peak_unsharded_units == 2


@on_ranks(2)
def test_what_is_needed_is_no_prefetch():
    model = stack(backward_prefetch=None, forward_prefetch=False)
    step(model)
    step(model)
    stats = model.engine.stats
    assert (stats.prefetches, stats.declined_prefetches) == (0, 0)
    assert all(unit.state.sharded is ShardedState.SHARDED for unit in model.engine.units)


@pytest.mark.parametrize("prefetches", [True, False])
@on_ranks(2)
def test_what_was_gathered_ahead_last_is_known(prefetches):
    """prefetch_stats.py asks for it."""
    model = stack(backward_prefetch=None, forward_prefetch=prefetches)
    step(model)
    seen = []
    model.engine.units[1].module.register_forward_hook(
        lambda *_: seen.append(model.engine.prefetcher.ahead)
    )
    step(model)
    assert seen == [model.engine.units[2] if prefetches else None]

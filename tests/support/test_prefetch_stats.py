"""support/prefetch_stats.py: what is counted. tests/test_prefetch.py counts in whole steps."""

from types import SimpleNamespace

from minifsdp.checks.rank_agreement import DIVERGED
from minifsdp.support.prefetch_stats import MISTARGETS, PrefetchStats
from minifsdp.unit_state import BACKWARD, UnitState


def new_unit(unsharded=False, reshard_after_forward=True, reasons=()):
    unit = SimpleNamespace(
        state=UnitState(),
        unsharded=SimpleNamespace(needs_unshard=True),
        reshard_after_forward=reshard_after_forward,
        reasons={*reasons},
    )
    if unsharded:
        unit.state.start_unshard()
    return unit


def counted(stats):
    assert tuple(stats.mistargets) == MISTARGETS
    return {kind: count for kind, count in stats.mistargets.items() if count}


def test_a_prefetch_that_is_used_next_is_no_mistake():
    stats, target = PrefetchStats(), new_unit()
    stats.issued(target)
    target.state.start_unshard()
    stats.needed(target)
    stats.needed(new_unit())
    assert stats.prefetches == 1 and counted(stats) == {}


def test_another_unit_is_needed_first():
    stats, target = PrefetchStats(), new_unit()
    stats.issued(target)
    target.state.start_unshard()
    stats.needed(new_unit(unsharded=True))  # it does not have to wait for anything
    assert counted(stats) == {}
    stats.needed(new_unit())
    stats.needed(new_unit())
    assert counted(stats) == {"not needed yet": 1}  # once, however many come first


def test_a_target_that_was_resharded_in_between_is_in_no_ones_way():
    stats = PrefetchStats()
    stats.issued(new_unit())
    stats.needed(new_unit())
    assert counted(stats) == {}


def test_what_the_last_pass_has_prefetched_does_not_count():
    stats, target = PrefetchStats(), new_unit()
    stats.issued(target)
    target.state.start_unshard()
    stats.start_pass()
    stats.needed(new_unit())
    assert counted(stats) == {}


def test_a_target_that_is_unsharded_already():
    stats = PrefetchStats()
    stats.skipped(new_unit(unsharded=True, reasons=[BACKWARD]))
    assert counted(stats) == {"already unsharded": 1} and stats.prefetches == 0


def test_a_target_that_is_unsharded_as_it_should_be():
    stats, target = PrefetchStats(), new_unit(unsharded=True)
    stats.skipped(new_unit(unsharded=True, reshard_after_forward=False))
    stats.skipped(new_unit(unsharded=True, reasons=[BACKWARD, DIVERGED]))
    stats.issued(target)
    stats.skipped(target)
    assert counted(stats) == {}


def test_a_target_that_has_had_its_turn_in_this_backward():
    stats, target = PrefetchStats(), new_unit()
    target.state.complete_grad()
    stats.skipped(target)
    assert counted(stats) == {"already resharded": 1}

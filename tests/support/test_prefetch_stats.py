"""prefetch_stats.py: what is counted. tests/test_prefetch.py counts in whole steps."""

from types import SimpleNamespace

from minifsdp.checks.rank_agreement import DIVERGED
from minifsdp.core.unit_state import BACKWARD, UnitState
from minifsdp.support.prefetch_stats import MISTARGETS, CountedPrefetcher, Mistargets


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


def counted(prefetcher):
    mistargets = prefetcher.stats.mistargets
    assert tuple(mistargets) == MISTARGETS
    return {kind: count for kind, count in mistargets.items() if count}


def gathered_ahead(target):
    prefetcher = CountedPrefetcher(None, None)
    prefetcher.ahead = target
    return prefetcher


def needed(prefetcher, unit):
    engine = SimpleNamespace(prefetcher=prefetcher)
    Mistargets(engine).before_forward(SimpleNamespace(unit=unit))


def test_a_prefetch_that_is_used_next_is_no_mistake():
    target = new_unit()
    prefetcher = gathered_ahead(target)
    target.state.start_unshard()
    needed(prefetcher, target)
    needed(prefetcher, new_unit())
    assert counted(prefetcher) == {}


def test_another_unit_is_needed_first():
    target = new_unit()
    prefetcher = gathered_ahead(target)
    target.state.start_unshard()
    needed(prefetcher, new_unit(unsharded=True))  # it does not have to wait for anything
    assert counted(prefetcher) == {}
    needed(prefetcher, new_unit())
    needed(prefetcher, new_unit())
    assert counted(prefetcher) == {"not needed yet": 1}  # once, however many come first


def test_a_target_that_was_resharded_in_between_is_in_no_ones_way():
    prefetcher = gathered_ahead(new_unit())
    needed(prefetcher, new_unit())
    assert counted(prefetcher) == {}


def test_what_the_last_pass_has_prefetched_does_not_count():
    for start in (CountedPrefetcher.start_forward, CountedPrefetcher.start_backward):
        target = new_unit()
        prefetcher = gathered_ahead(target)
        target.state.start_unshard()
        start(prefetcher)
        needed(prefetcher, new_unit())
        assert counted(prefetcher) == {}


def test_a_target_that_is_unsharded_already():
    prefetcher = gathered_ahead(None)
    assert not prefetcher.is_sound(new_unit(unsharded=True, reasons=[BACKWARD]))
    assert counted(prefetcher) == {"already unsharded": 1}


def test_a_target_that_is_unsharded_as_it_should_be():
    target = new_unit(unsharded=True)
    prefetcher = gathered_ahead(target)
    assert not prefetcher.is_sound(new_unit(unsharded=True, reshard_after_forward=False))
    assert not prefetcher.is_sound(new_unit(unsharded=True, reasons=[BACKWARD, DIVERGED]))
    assert not prefetcher.is_sound(target)
    assert counted(prefetcher) == {}


def test_a_target_that_has_had_its_turn_in_this_backward():
    prefetcher, target = gathered_ahead(None), new_unit()
    assert prefetcher.is_sound(target)
    target.state.complete_grad()
    assert not prefetcher.is_sound(target)
    assert counted(prefetcher) == {"already resharded": 1}

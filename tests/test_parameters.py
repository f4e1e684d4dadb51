"""parameters.py: units are gathered and freed once, and counted."""

from unittest.mock import Mock

import pytest
import torch

from minifsdp.core.engine import Engine
from minifsdp.core.unit_state import FORWARD, PREFETCH, Purpose
from minifsdp.featured_unit import FeaturedUnit
from tests.parity import check_at_rest
from tests.ranks import on_ranks
from tests.small import batch, layers, stack, step, storage, travels


def started() -> tuple[Engine, FeaturedUnit]:
    """An engine that is ready for a forward, and a unit that is not the root."""
    engine = stack().engine
    engine.start(Purpose.TRAIN)
    return engine, engine.units[1]


@on_ranks(2)
def test_gathering_and_freeing_twice_is_gathering_and_freeing_once():
    engine, unit = started()
    engine.parameters.unshard(unit, FORWARD)
    engine.parameters.unshard(unit, FORWARD)
    assert engine.stats.all_gathers == engine.stats.unsharded_units == 1
    assert engine.stats.unsharded_bytes == unit.unsharded.nbytes == storage(unit)
    engine.parameters.reshard(unit)
    engine.parameters.reshard(unit)
    unit.let_go(FORWARD)
    assert engine.stats.unsharded_units == engine.stats.unsharded_bytes == 0
    assert engine.stats.peak_unsharded_bytes == unit.unsharded.nbytes


@on_ranks(2)
def test_a_unit_is_freed_when_its_last_reason_is_gone():
    engine, unit = started()
    engine.parameters.unshard(unit, FORWARD)
    engine.parameters.unshard(unit, "a second one")
    unit.hold("a second one")  # to hold for a reason twice is to hold for it once
    unit.let_go("a third one")
    unit.let_go("a second one")
    assert storage(unit)
    unit.let_go("a third one", FORWARD)
    assert not storage(unit)
    unit.hold(FORWARD)
    assert not storage(unit)  # a reason does not gather


@on_ranks(2)
def test_what_was_prefetched_stays_till_its_turn_and_is_freed_after_it():
    engine, unit = started()
    engine.parameters.prefetch(unit)
    assert unit.reasons == {PREFETCH} and storage(unit)
    engine.parameters.unshard(unit, FORWARD)
    assert unit.reasons == {FORWARD} and engine.stats.all_gathers == 1
    unit.let_go(FORWARD)
    assert not storage(unit)


@on_ranks(2)
def test_a_failing_gather_reaches_the_caller_and_leaves_nothing():
    model, plain = stack(), layers()
    gone = Mock(side_effect=ConnectionError("rank 1 is gone"))
    with (
        travels("all_gather", lambda _: gone),
        pytest.raises(ConnectionError, match="rank 1 is gone"),
    ):
        model(batch())
    check_at_rest(model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())
    assert model.engine.stats.declined_prefetches == 0  # the limiter knows that it is gone


@on_ranks(2)
def test_prefetches_for_which_there_is_no_room_are_counted():
    model = stack(3, limit_all_gathers=1, forward_prefetch=False)
    for at in range(2):
        step(model, at)
        assert model.engine.stats.declined_prefetches == 2 * (at + 1)  # the root's has room

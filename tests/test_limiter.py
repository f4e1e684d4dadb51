"""limiter.py: how many units at once."""

import pytest
import torch
from torch.profiler import profile

from minifsdp import BackwardPrefetch, NoLimit, ShardingStrategy, SynchronizeAfterFree
from minifsdp import FullyShardedDataParallel as FSDP
from tests.lagging import count_alive, lagging_device
from tests.ranks import on_ranks
from tests.small import layers, stack, step, watch

MODES = (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None)


def alive_per_step(steps, blocks=8, **settings):
    """The largest number of units alive, for each step, on a device that lags."""
    with lagging_device():
        model = stack(blocks, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        peaks = []
        with count_alive(model) as counts:
            for at in range(steps):
                step(model, at)
                optimizer.step()
                optimizer.zero_grad()
                peaks.append(max(counts))
                counts.clear()
        return peaks, model.engine


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("limit", [1, 2, 3])
@on_ranks(1)
def test_the_bound_holds_in_every_step_and_does_not_drift(limit, backward, forward):
    peaks, _ = alive_per_step(
        10, limit_all_gathers=limit, backward_prefetch=backward, forward_prefetch=forward
    )
    assert max(peaks) <= limit
    if limit > 1:
        assert min(peaks) == limit  # and it is made use of


@on_ranks(1)
def test_the_default_is_two_and_one_that_the_host_has_freed():
    peaks, engine = alive_per_step(6)
    assert peaks == [3] * 6
    assert engine.stats.peak_unsharded_units == 1 + 2  # the root, and two at a time


@on_ranks(1)
def test_without_a_limit_the_host_runs_ahead_of_everything():
    peaks, engine = alive_per_step(3, limit_all_gathers=False)
    assert isinstance(engine.limiter, NoLimit)
    assert peaks[0] >= 16 and peaks[2] > peaks[1] > peaks[0]
    assert engine.streams.compute.host_waits == 0


@on_ranks(1)
def test_fairscales_way_waits_after_every_free():
    peaks, engine = alive_per_step(3, limit_all_gathers=SynchronizeAfterFree())
    assert max(peaks) <= 2  # one in use, one prefetched
    frees = 3 * 2 * 8  # 8 blocks forward and backward; the root was freed long before it is told
    assert engine.streams.compute.host_waits == frees


@on_ranks(1)
def test_pytorchs_way_waits_for_an_older_event_so_the_host_stays_ahead():
    _, queue = alive_per_step(3, backward_prefetch=None)
    _, after_free = alive_per_step(
        3, backward_prefetch=None, limit_all_gathers=SynchronizeAfterFree()
    )
    compute = queue.streams.compute
    assert compute.reached < compute.marks
    assert compute.host_waits < after_free.streams.compute.host_waits


@on_ranks(1)
def test_units_that_stay_are_not_counted_but_their_frees_are():
    peaks, engine = alive_per_step(
        3, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, forward_prefetch=True
    )
    # All eight are alive by their strategy; of the step before, at most one is still on its way
    # out.
    assert peaks[0] == 8 and max(peaks) <= 9
    assert engine.stats.declined_prefetches == 0


@on_ranks(1)
def test_units_around_a_unit_do_not_count_against_it():
    with lagging_device():
        inner = [FSDP(layers(0)) for _ in range(4)]
        model = FSDP(torch.nn.Sequential(FSDP(torch.nn.Sequential(layers(0), *inner))))
        for at in range(3):
            step(model, at)
        assert model.engine.stats.declined_prefetches == 0
        assert model.engine.stats.peak_unsharded_units == 1 + 2  # the middle one; root has none


@on_ranks(2)
def test_with_a_limit_of_one_no_prefetch_is_admitted():
    model = stack(limit_all_gathers=1, forward_prefetch=True)
    with watch(model) as log:
        for at in range(3):
            step(model, at)
    alive, most = set(), 0
    for entry in log:
        (alive.add if entry[0] == "+" else alive.discard)(entry[1:])
        most = max(most, len(alive - {"root"}))
    assert most == 1 and model.engine.stats.declined_prefetches > 0


@on_ranks(1)
def test_the_profiler_shows_a_wait_where_there_was_one_and_only_there():
    name = "FullyShardedDataParallel.rate_limiter"
    with lagging_device():
        lagging = stack()
        with profile() as recorded:
            step(lagging)
        waits = [event for event in recorded.events() if event.name == name]
        assert len(waits) == lagging.engine.streams.compute.host_waits > 0
    prompt = stack()
    with profile() as recorded:
        step(prompt)
    assert not [event for event in recorded.events() if event.name == name]

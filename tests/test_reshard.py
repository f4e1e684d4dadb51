"""reshard.py: let a unit's full parameters go."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from minifsdp import BackwardPrefetch, ShardingStrategy
from minifsdp.core.reshard import reshard
from minifsdp.core.streams import CpuEvent
from minifsdp.core.unit_state import Purpose, ShardedState
from minifsdp.core.unshard import unshard, wait_for_unshard
from minifsdp.core.views import make_views, show_views
from minifsdp.sim import cluster
from tests.lagging import LateStream, lagging_device
from tests.lone_unit import lone_unit
from tests.ranks import on_ranks
from tests.small import batch, stack, step, storage


@pytest.mark.direct
class TestDirectly:
    def test_the_memory_is_gone_and_the_tensor_is_not(self):
        with lone_unit() as lone:
            lone.fill()
            before = lone.unit.unsharded.flat_param
            reshard(lone.unit, lone.streams)
            assert lone.memory == 0, f"{lone.memory} bytes are left in the storage"
            assert lone.unit.unsharded.flat_param is before, "views that autograd saved are of it"
            assert lone.unit.state.sharded is ShardedState.SHARDED

    def test_modules_have_placeholders_that_refuse_to_compute(self):
        with lone_unit() as lone:
            lone.fill()
            show_views(lone.unit)
            reshard(lone.unit, lone.streams)
            with pytest.raises(RuntimeError, match="'weight'"):
                torch.add(lone.module.weight, 1)

    def test_a_gather_that_was_not_waited_for_is_over_before_its_memory_goes(self):
        with lone_unit() as lone:
            lone.unit.state.start_unshard()
            lone.unit.unsharded.allocate()
            memory = []
            lone.unit.unshard_event = CpuEvent(lambda: memory.append(lone.memory))
            reshard(lone.unit, lone.streams)
            assert memory == [40], "the gather writes to that memory until its event is passed"
            assert lone.unit.unshard_event is None, "it would be waited for twice"

    def test_the_event_is_passed_when_the_computation_is_done_with_the_memory(self):
        with lone_unit() as lone:
            lone.fill()
            compute = LateStream()
            done = reshard(lone.unit, replace(lone.streams, compute=compute))
            assert done is not None and not done.query(), "it is an event of the compute stream"
            compute.record_event().synchronize()
            assert done.query(), "it is recorded before the next kernels are launched"


def unsharded_unit():
    model = stack()
    model.engine.start(Purpose.TRAIN)
    unit, streams = model.engine.units[1], model.engine.streams
    unshard(unit, streams)
    wait_for_unshard(unit)
    make_views(unit)
    show_views(unit)
    return unit, streams


@on_ranks(2)
def test_the_storage_is_really_gone():
    unit, streams = unsharded_unit()
    storage = unit.unsharded.storage
    assert storage.size() == unit.unsharded.nbytes
    reshard(unit, streams)
    assert storage.size() == 0 and unit.state.sharded is ShardedState.SHARDED
    with pytest.raises(RuntimeError, match="sharded"):
        torch.add(unit.param_infos[0].owners[0][0].weight, 1)


@on_ranks(2)
def test_gathering_again_revives_what_autograd_has_saved():
    unit, streams = unsharded_unit()
    saved, expected = unit.views[0], unit.views[0].detach().clone()
    reshard(unit, streams)
    unshard(unit, streams)
    wait_for_unshard(unit)
    assert torch.equal(saved, expected)


@on_ranks(2)
def test_a_gather_that_nobody_waited_for_is_over_before_its_memory_goes():
    model = stack()
    model.engine.start(Purpose.TRAIN)
    unit = model.engine.units[1]
    unshard(unit, model.engine.streams)
    event = unit.unshard_event
    reshard(unit, model.engine.streams)
    assert event.query() and unit.unshard_event is None and storage(unit) == 0
    dist.barrier()


@on_ranks(1)
def test_it_is_the_computation_that_has_to_be_done_with_the_memory():
    """The gather was over long ago; what the limiter has to wait for is what reads its result."""
    with lagging_device():
        unit, streams = unsharded_unit()
        done = reshard(unit, streams)
        assert not done.query()
        streams.compute.record_event().synchronize()
        assert done.query()


def test_the_allocator_does_not_give_the_memory_away_while_it_is_computed_with():
    with cluster(nodes=1, gpus_per_node=2, kind="cpu") as gpu:
        model = stack()
        for at in range(2):
            step(model, at)
    assert not gpu.races()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@on_ranks(2)
def test_what_is_alive_between_forward_and_backward_is_what_the_strategy_says(strategy):
    model = stack(sharding_strategy=ShardingStrategy[strategy])
    loss = model(batch()).sum()
    alive = [storage(unit) > 0 for unit in model.engine.units]
    kept = strategy == "SHARD_GRAD_OP"
    assert alive == [True, kept, kept, kept, kept]  # the root's backward comes next
    loss.backward()
    assert not any(storage(unit) for unit in model.engine.units)


@pytest.mark.parametrize("prefetch, units", [("pre", 2), ("post", 2), (None, 1)])
@on_ranks(2)
def test_the_peak_is_a_few_units_and_not_the_model(prefetch, units):
    modes = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST}
    model = stack(12, backward_prefetch=modes.get(prefetch), forward_prefetch=prefetch is not None)
    peak = 0

    def measure(*_):
        nonlocal peak
        peak = max(peak, sum(storage(unit) for unit in model.engine.units))

    for block in model.module[1:]:
        block.module[0].register_forward_hook(measure)
        block.module[0].register_full_backward_hook(measure)
    for at in range(3):
        step(model, at)
    each = model.engine.units[1].unsharded.nbytes
    assert peak <= (1 + units) * each  # the root, and `units` blocks
    assert model.engine.stats.peak_unsharded_bytes <= (1 + units) * each


@on_ranks(2)
def test_without_gradients_nothing_is_kept():
    model = stack(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with torch.no_grad():
        model(batch())
    assert not any(storage(unit) for unit in model.engine.units)

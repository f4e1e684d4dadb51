"""engine.py: what the units of one root share, and the verbs with it."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifsdp.comm.collectives
import minifsdp.reduce
from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import cluster
from minifsdp.streams import CpuEvent, CpuStream, Streams
from minifsdp.unit_state import TrainingState
from tests.parity import check_at_rest, grid
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    reductions,
    replaced,
    stack,
    step,
    storage,
    watch,
)
from tests.support.test_unsharded_storage import TwoEnds


@on_ranks(1)
def test_gathers_wait_for_what_the_optimizer_writes():
    model, log = stack(), []

    class Noted(CpuStream):
        def record_event(self):
            log.append("mark")
            return CpuEvent()

        def wait_event(self, event):
            log.append("wait")

        def submit(self, launch, label=""):
            log.append("gather")
            return super().submit(launch, label)

    if device().type == "cuda":
        pytest.skip("of the order of calls; the streams are placeholders")
    stream = Noted()
    model.engine.streams = replace(Streams.on(device()), compute=stream, unshard=stream)
    model.engine.start(training=True)
    model.engine.gather(model.engine.units[1])
    assert log.index("mark") < log.index("wait") < log.index("gather")


@on_ranks(2)
def test_gathering_and_freeing_twice_is_gathering_and_freeing_once():
    model = stack()
    engine, unit = model.engine, model.engine.units[1]
    engine.start(training=True)
    engine.gather(unit)
    engine.gather(unit)
    assert engine.stats.all_gathers == engine.stats.unsharded_units == 1
    assert engine.stats.unsharded_bytes == unit.unsharded.nbytes == storage(unit)
    engine.free(unit)
    engine.free(unit)
    assert engine.stats.unsharded_units == engine.stats.unsharded_bytes == 0
    assert engine.stats.peak_unsharded_bytes == unit.unsharded.nbytes


@on_ranks(2)
def test_gradients_are_handed_over_all_or_none():
    model = stack()
    engine = model.engine
    engine.start(training=True)
    with reductions() as started:
        for unit in engine.units[:3]:
            engine.reduce(unit, torch.ones(42, device=device()))
    started[1].event = CpuEvent(Mock(side_effect=ConnectionError("gone")))
    with pytest.raises(ConnectionError):
        engine.finish_gradients()
    assert all(unit.sharded_flat_param.grad is None for unit in engine.units)


@on_ranks(2)
def test_at_most_one_reduction_is_under_way():
    model, open_at_once = stack(), []
    with reductions() as started:

        def counted(*args):
            open_at_once.append(sum(not r.event.query() for r in started))
            return reduce_gradient(*args)

        reduce_gradient = minifsdp.reduce.reduce_gradient
        with replaced(reduce_gradient, counted):
            step(model)
    assert open_at_once == [0] * 5
    assert all(reduction.event.query() for reduction in started)


@on_ranks(2)
def test_after_a_step_nothing_of_its_reductions_is_kept():
    model = stack()
    with reductions() as started:
        step(model)
    alive = [weakref.ref(reduction) for reduction in started]
    started.clear()
    gc.collect()
    assert alive and not any(reduction() for reduction in alive)


@on_ranks(2)
def test_units_on_several_devices_are_refused():
    model = stack()
    model.engine.units[2].sharded_flat_param = nn.Parameter(torch.empty(21, device="meta"))
    with pytest.raises(ValueError, match=r"all units have to be on one device.*meta: '2'"):
        model(batch())


@pytest.mark.parametrize(
    "strategy, gathers", [("FULL_SHARD", 9), ("SHARD_GRAD_OP", 5), ("NO_SHARD", 0)]
)
@on_ranks(2)
def test_collectives_of_a_step_are_as_many_as_the_strategy_says(strategy, gathers):
    """n units and the root: 2n + 1 gathers and n + 1 reductions under FULL_SHARD."""
    model = stack(4, sharding_strategy=ShardingStrategy[strategy])
    step(model)
    assert model.engine.stats.all_gathers == gathers
    assert model.engine.stats.reductions == 5


@on_ranks(2)
def test_a_failing_gather_reaches_the_caller_and_leaves_nothing():
    model, plain = stack(), layers()
    gone = Mock(side_effect=ConnectionError("rank 1 is gone"))
    with (
        replaced(minifsdp.comm.collectives.all_gather, gone),
        pytest.raises(ConnectionError, match="rank 1 is gone"),
    ):
        model(batch())
    check_at_rest(model)
    assert torch.equal(step(model), plain(batch()).pow(2).sum())
    assert model.engine.stats.declined_prefetches == 0  # the limiter knows that it is gone


def interrupt(*_):
    raise InterruptedError


@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_what_is_still_being_sent_is_not_given_away_after_an_exception(strategy, offload):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(sharding_strategy=ShardingStrategy[strategy], cpu_offload=offload)
        handle = model.module[2].register_full_backward_hook(interrupt)
        with pytest.raises(InterruptedError):
            step(model)
        handle.remove()
        step(model)
    assert not gpu.races()


@on_ranks(2)
def test_the_last_gradient_gets_its_second_half_too():
    model = stack(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=grid(ShardingStrategy.HYBRID_SHARD),
    )
    model.engine.start(training=True)
    for number, unit in enumerate(model.engine.units[:2]):
        grad = torch.full((42,), float(number + dist.get_rank()), device=device())
        model.engine.reduce(unit, grad)
    model.engine.finish_gradients()
    assert [float(unit.sharded_flat_param.grad[0]) for unit in model.engine.units[:2]] == [0.5, 1.5]


@pytest.mark.parametrize("synchronizes", [True, False])
@on_ranks(2)
def test_what_a_backward_that_failed_has_left_is_dropped(synchronizes):
    """Gradients that it kept, and how far its units and ranks were: the ranks had gone apart."""
    torch.manual_seed(0)
    plain = TwoEnds().to(device())
    torch.manual_seed(0)
    model = FSDP(TwoEnds().to(device()), auto_wrap_policy=ModuleWrapPolicy({Block}))
    with watch(model) as before:
        model(batch())
    x = batch().requires_grad_()
    x.register_hook(interrupt)
    with (
        pytest.raises(InterruptedError),
        nullcontext() if synchronizes else model.no_sync(),
    ):
        model(x)[dist.get_rank()].backward()
    with watch(model) as after:
        losses = model(batch())
    assert after[after.index("+root") :] == before  # first, what was left is freed
    assert model.engine.stats.unsharded_units == 1  # the root stays, and nobody else
    with nullcontext() if synchronizes else model.no_sync():
        sum(losses).backward()
    sum(model(batch(step=1))).backward()
    expected = [sum(plain(batch(step=at))) for at in range(2)]
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *expected))


@on_ranks(2)
def test_after_a_backward_that_failed_units_are_idle_and_an_evaluation_keeps_none():
    model = stack()
    handle = model.module[2].register_full_backward_hook(interrupt)
    with pytest.raises(InterruptedError):
        step(model)
    handle.remove()
    in_parts = model.engine.units[1].unsharded.flat_param
    in_parts.grad = torch.ones_like(in_parts)  # as a reentrant checkpoint leaves it
    with torch.no_grad():
        model.eval()(batch())
    assert all(unit.state.training is TrainingState.IDLE for unit in model.engine.units)
    assert not any(map(storage, model.engine.units)) and in_parts.grad is None


@on_ranks(2)
def test_ranks_without_a_gradient_send_zeros_in_the_dtype_of_the_others():
    torch.manual_seed(0)
    plain = TwoEnds().to(device(), torch.bfloat16)
    torch.manual_seed(0)
    low = MixedPrecision(torch.bfloat16)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(TwoEnds().to(device()), auto_wrap_policy=policy, mixed_precision=low)
    model(batch())[dist.get_rank()].backward()
    losses = plain(batch().to(torch.bfloat16))
    losses[1 - dist.get_rank()] *= 0
    expected = mean_gradients(plain, *losses)
    for name, grad in gathered_gradients(model).items():
        assert torch.equal(grad, expected[name].float()), name


@on_ranks(2)
def test_prefetches_for_which_there_is_no_room_are_counted():
    model = stack(3, limit_all_gathers=1)
    for at in range(2):
        step(model, at)
        assert model.engine.stats.declined_prefetches == 2 * (at + 1)  # the root's has room

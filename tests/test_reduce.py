"""reduce.py: turn a unit's gradient into this rank's share of the mean over ranks."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.comm.groups import HYBRID
from minifsdp.core.reduce import AllReduce, Reduction, store_gradient
from minifsdp.core.unit_state import Purpose
from minifsdp.sim import cluster
from tests.lagging import deferring_device
from tests.lone_unit import lone_unit
from tests.parity import grid
from tests.ranks import device, on_ranks, run
from tests.small import (
    assert_same_gradients,
    batch,
    gathered_gradients,
    layers,
    mean_gradients,
    reductions,
    stack,
    step,
)

STRATEGIES = list(ShardingStrategy)
OFFLOADS = pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])


def started(unit, grad, streams):
    reduction = Reduction(unit, grad, streams)
    reduction.start()
    return reduction


def reduced(unit, grad, streams):
    """From the start to the end of one reduction, as the engine does it."""
    reduction = started(unit, grad, streams)
    while reduction.advance():
        pass
    reduction.wait_for_result()
    return reduction


@pytest.mark.direct
class TestDirectly:
    """Each other rank's gradient is 10 in all places."""

    def test_the_reduction_is_started_and_not_waited_for(self):
        with lone_unit() as lone:
            reduction = started(lone.unit, torch.zeros(10), lone.streams)
            assert lone.unit.shard_group.called == ["reduce-scatter"], "one is started"
            assert not reduction.event.query(), "the backward goes on meanwhile"

    @pytest.mark.parametrize("rank, expected", [(0, [5, 6, 7, 8, 9]), (1, [10, 11, 12, 13, 14])])
    def test_a_rank_gets_its_chunk_of_the_mean(self, rank, expected):
        with lone_unit(rank) as lone:
            grad = torch.arange(0.0, 20, 2)
            assert reduced(lone.unit, grad, lone.streams).value.tolist() == expected

    @pytest.mark.parametrize("ranks, mean", [(1, [5.0] * 10), (2, [6.25] * 5)])
    def test_replicas_add_up_what_their_ranks_have(self, ranks, mean):
        with lone_unit(ranks=ranks, replicas=2) as lone:
            grad = torch.full((10,), 0.0 if ranks == 1 else -5.0)
            reduction = reduced(lone.unit, grad, lone.streams)
            assert lone.unit.replicate_group.called == ["all-reduce", "its second half"]
            assert reduction.value.tolist() == mean

    def test_an_all_reduce_that_is_one_collective_is_one_stage(self):
        with lone_unit(ranks=1, replicas=2) as lone:
            lone.unit.stages = [AllReduce("reduce")]  # as on a GPU
            grad = torch.zeros(10)
            reduction = started(lone.unit, grad, lone.streams)
            assert not reduction.event.query(), "the backward goes on meanwhile"
            assert not reduction.advance(), "nothing is left"
            assert lone.unit.replicate_group.called == ["all-reduce"]
            assert reduction.value is grad and grad.tolist() == [5.0] * 10

    def test_the_optimizer_gets_the_sum_of_its_gradients_without_padding(self):
        with lone_unit(rank=2, ranks=3) as lone:  # which has 9, 10, and padding
            for total in (1.0, 2.0):
                result = torch.tensor([1.0, 1.0, torch.nan, torch.nan])
                store_gradient(Reduction(lone.unit, result, lone.streams))
                assert lone.unit.sharded_flat_param.grad.tolist() == [total, total]

    def test_what_is_sent_is_kept_till_it_has_arrived(self):
        with lone_unit() as lone:
            grad = torch.zeros(10)
            reduction = started(lone.unit, grad, lone.streams)
            assert any(tensor is grad for tensor in reduction.sent), "its memory is being read"
            reduction.advance()
            assert reduction.sent is None, "its memory would be held to the end of the backward"

    def test_sums_are_in_the_reduce_dtype(self):
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        with lone_unit(precision=precision) as lone:
            grad = torch.zeros(10, dtype=torch.bfloat16)
            reduction = started(lone.unit, grad, lone.streams)
            kept = [tensor.dtype for tensor in reduction.sent]
            assert kept == [torch.bfloat16, torch.float32], "what is sent is the cast"
            assert reduced(lone.unit, grad, lone.streams).value.dtype is torch.float32


def sharded(strategy, **settings):
    mesh = grid(strategy) if strategy in HYBRID else None
    return stack(sharding_strategy=strategy, device_mesh=mesh, **settings)


def check_mean(strategy, offload):
    model, plain = sharded(strategy, cpu_offload=offload), layers()
    step(model)
    expected = mean_gradients(plain, plain(batch()).pow(2).sum())
    assert_same_gradients(gathered_gradients(model), expected)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@OFFLOADS
def test_the_gradient_is_the_mean_over_ranks(offload, strategy, world_size):
    run(check_mean, world_size, strategy, offload)


@on_ranks(2)
def test_each_rank_keeps_its_own_part():
    model = stack()
    model.engine.start(Purpose.TRAIN)
    unit = model.engine.units[1]
    grad = torch.arange(42.0, device=device()) * (dist.get_rank() + 1)
    reduction = reduced(unit, grad, model.engine.streams)
    expected = (torch.arange(42.0, device=device()) * 1.5).chunk(2)[dist.get_rank()]
    assert torch.equal(reduction.value, expected)


@pytest.mark.parametrize("strategy", HYBRID)
@on_ranks(4)
def test_with_hybrid_sharding_there_are_two_means_one_after_the_other(strategy):
    """Ranks 0 and 1 are a row, 0 and 2 a column; each of four gives its own number."""
    model = sharded(strategy)
    model.engine.start(Purpose.TRAIN)
    grad = torch.full((42,), 10.0 ** dist.get_rank(), device=device())
    reduction = reduced(model.engine.units[1], grad, model.engine.streams)
    assert reduction.value.shape == (21,)
    assert (reduction.value == (1 + 10 + 100 + 1000) / 4).all()


@on_ranks(2)
def test_the_result_does_not_keep_the_whole_gradient_alive():
    model = stack()
    step(model)
    for unit in model.engine.units:
        assert unit.sharded_flat_param.grad.untyped_storage().size() == unit.padded_shard.nbytes


@on_ranks(2)
def test_what_was_sent_is_let_go_once_it_has_arrived_and_not_before():
    model = stack()
    model.engine.start(Purpose.TRAIN)
    grad = torch.ones(42, device=device())
    reduction = started(model.engine.units[1], grad, model.engine.streams)
    assert any(tensor is grad for tensor in reduction.sent)
    reduction.advance()
    assert reduction.sent is None and reduction.event.query()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_add_up_until_they_are_cleared(strategy):
    model, plain = sharded(strategy), layers()
    for at in range(3):
        step(model, at)
    losses = [plain(batch(step=at)).pow(2).sum() for at in range(3)]
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))


@on_ranks(2)
def test_what_has_waited_is_reduced_once():
    model, plain = stack(), layers()
    with model.no_sync():
        step(model, 0)
    step(model, 1)
    step(model, 2)
    losses = [plain(batch(step=at)).pow(2).sum() for at in range(3)]
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *losses))


@OFFLOADS
@on_ranks(2)
def test_the_host_waits_only_for_what_it_reads_itself(offload):
    engine, event = stack(cpu_offload=offload).engine, Mock()
    reduction = Reduction(engine.units[1], torch.empty(0), engine.streams)
    reduction.event = event
    reduction.wait_for_result()
    assert event.synchronize.called == (offload is not None)
    assert event.wait.called == (offload is None)


@on_ranks(2)
def test_a_result_is_stored_without_copying_it():
    model = stack()
    model.engine.start(Purpose.TRAIN)
    unit = model.engine.units[1]
    reduction = reduced(unit, torch.ones(42, device=device()), model.engine.streams)
    store_gradient(reduction)
    assert unit.sharded_flat_param.grad.data_ptr() == reduction.value.data_ptr()


@pytest.mark.parametrize("keep, stored", [(False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.float16], ids=str)
@on_ranks(2)
def test_a_gradient_is_cast_before_it_is_added_up_and_again_when_it_is_stored(
    reduce_dtype, keep, stored
):
    precision = MixedPrecision(torch.bfloat16, reduce_dtype, keep_low_precision_grads=keep)
    model = stack(mixed_precision=precision)
    model.engine.start(Purpose.TRAIN)
    unit, streams = model.engine.units[1], model.engine.streams
    # 1 + 2**-8 is no number in bfloat16, which rounds it to 1
    value = torch.tensor(2.0 if dist.get_rank() == 0 else 2.0**-7)
    grad = torch.full((42,), value, dtype=torch.bfloat16, device=device())
    reduction = reduced(unit, grad, streams)
    assert reduction.value.dtype is (reduce_dtype or torch.bfloat16)
    store_gradient(reduction)
    assert unit.sharded_flat_param.grad.dtype is stored
    mean = 1 + 2.0**-8 if reduce_dtype is not None and not keep else 1
    assert (unit.sharded_flat_param.grad == mean).all()


@OFFLOADS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_part_of_it_waits_for_the_one_before(strategy, offload):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(sharding_strategy=strategy, cpu_offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for at in range(2):
            step(model, at)
            optimizer.step()
            optimizer.zero_grad()
    assert not gpu.races()


@OFFLOADS
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_however_late_it_is_the_optimizer_gets_the_mean(strategy, offload):
    if device().type == "cuda":
        pytest.skip("the streams are placeholders")
    with deferring_device():
        check_mean(strategy, offload)


@on_ranks(2)
def test_a_reduction_goes_on_while_the_backward_does():
    """Counted, not timed: when unit 4's gradient is on its way, unit 3's backward still
    computes."""
    model, open_when = stack(), []
    with reductions() as started:

        def note(*_):
            open_when.append(any(not reduction.event.query() for reduction in started))

        model.module[1].module[0].register_full_backward_hook(note)
        step(model)
    if device().type == "cuda":
        pytest.skip("the host does not see how far a GPU has come")
    assert open_when == [True]


@on_ranks(4)
def test_so_do_its_later_stages():
    """When chunks are on their way to the replicas and the host, others are still computed: of unit
    4 at first one half of the all-reduce, then the other, then the copy."""
    if device().type == "cuda":
        pytest.skip("the streams are placeholders")
    log = []
    with deferring_device():
        model = sharded(ShardingStrategy.HYBRID_SHARD, cpu_offload=CPUOffload(True))

        def note(*_):
            streams = model.engine.streams
            log.append((streams.replicate.under_way, streams.download.under_way))

        for unit in (2, 1):
            model.module[unit].module[0].register_full_backward_hook(note)
        model.module[0].register_full_backward_hook(note)
        step(model)
    assert log == [(True, False), (True, False), (True, True)]

"""strategies.py: what a unit sends in a gather, as a table."""

import pytest
import torch

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.offload import Upload
from minifsdp.precision import CastShard
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op
from minifsdp.strategies import source_of
from minifsdp.unshard import OwnShard, unshard, wait_for_unshard
from tests.lagging import deferring_device
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import layers, stack, step

LOW = MixedPrecision(torch.bfloat16)
TABLE = {
    # ranks that share it, offload, precision: from the inside outwards
    (2, False, None): [OwnShard],
    (2, True, None): [OwnShard, Upload],
    (2, False, LOW): [OwnShard, CastShard],
    (2, True, LOW): [OwnShard, Upload, CastShard],
    (2, False, MixedPrecision(reduce_dtype=torch.bfloat16)): [OwnShard],
    (1, False, None): [OwnShard],
    (1, True, None): [OwnShard, Upload],
    (1, False, LOW): [OwnShard],  # what is copied, and not sent, is cast by the copy
    (1, True, LOW): [OwnShard, Upload],
}
ORDERS = {
    "cast on the device": lambda group: CastShard(Upload(OwnShard(group))),
    "cast on the host": lambda group: Upload(CastShard(OwnShard(group))),
}


def chain(source) -> list[type]:
    inner = chain(source.inner) if hasattr(source, "inner") else []
    return [*inner, type(source)]


@pytest.mark.direct
class TestDirectly:
    @pytest.mark.parametrize("ranks, offload, precision", TABLE)
    def test_a_unit_has_what_it_needs_and_no_more(self, ranks, offload, precision):
        with lone_unit(ranks=ranks, offload=offload, precision=precision) as lone:
            expected = TABLE[ranks, offload, precision]
            assert chain(source_of(lone.unit)) == chain(lone.unit.source) == expected
            assert lone.unit.source is lone.unit.own_source
            assert lone.unit.source.group is lone.unit.shard_group

    @pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
    def test_the_sources_follow_the_mode(self, offload):
        low = MixedPrecision(torch.bfloat16, full_precision_in_eval=True)
        with lone_unit(precision=low, offload=offload) as lone:
            for training in (True, False, None, True):
                lone.unit.choose_precision(training)
                unshard(lone.unit, lone.streams)
                wait_for_unshard(lone.unit)
                dtype = torch.bfloat16 if training else torch.float32
                assert lone.unit.unsharded.data.dtype is dtype
                assert lone.gathered == list(range(1, 11))
                lone.unit.release()
                lone.unit.state.reshard()

    @pytest.mark.parametrize("order", ORDERS)
    def test_sources_wrap_each_other_in_any_order(self, order):
        with lone_unit(precision=LOW, offload=True) as lone:
            lone.unit.source = ORDERS[order](lone.unit.shard_group)
            for _ in range(2):
                unshard(lone.unit, lone.streams)
                wait_for_unshard(lone.unit)
                assert lone.unit.unsharded.data.dtype is torch.bfloat16
                assert lone.gathered == list(range(1, 11))
                lone.unit.release()
                lone.unit.state.reshard()
            assert lone.unit.shard_group.called == ["all-gather"] * 2


@pytest.mark.parametrize("order", ORDERS)
@on_ranks(2)
def test_in_any_order_they_wait_for_each_other(order):
    if device().type == "cuda":
        pytest.skip("the streams are placeholders")
    with deferring_device():
        model = stack(cpu_offload=CPUOffload(True), mixed_precision=LOW)
        model.engine.start(training=True)
        unit, streams = model.engine.units[1], model.engine.streams
        unit.source = ORDERS[order](unit.shard_group)
        unshard(unit, streams)
        wait_for_unshard(unit)
        expected = layers()[1][0].bfloat16()
        assert torch.equal(unit.unsharded.data[:36], expected.weight.flatten())


@pytest.mark.parametrize("order", ORDERS)
def test_on_a_gpu_no_wait_is_missing_in_any_order(order):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(cpu_offload=CPUOffload(True), mixed_precision=LOW, forward_prefetch=True)
        for unit in model.engine.units:
            unit.source = unit.own_source = ORDERS[order](unit.shard_group)
        for at in range(2):
            step(model, at)
    assert not gpu.races()
    (copy, *_) = (op for op in gpu.tape if isinstance(op, Op) and op.label == "upload '1'")
    size = 2 if order == "cast on the host" else 4
    assert copy.writes[0].nbytes == size * model.engine.units[1].padded_shard.numel()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_model_that_is_cast_sends_what_it_has_now(strategy):
    model = stack(sharding_strategy=ShardingStrategy[strategy], mixed_precision=LOW)
    step(model)
    model.double()
    step(model)
    unit = model.engine.units[1]
    assert unit.padded_shard.dtype is torch.float64
    assert unit.unsharded.dtype is torch.bfloat16
    assert unit.source is unit.own_source

"""strategies.py: what a unit sends in a gather and how, its views, and the stages of reductions."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.comm import collectives
from minifsdp.comm.unit_messages import DirectMessages, InBlocks, Watched
from minifsdp.core.collectives import TorchCollectives
from minifsdp.core.streams import BACKENDS, CpuStream, Streams
from minifsdp.core.unit_state import Purpose
from minifsdp.core.unshard import OwnShard, unshard, wait_for_unshard
from minifsdp.core.views import SplitViews
from minifsdp.offload import Upload
from minifsdp.precision import CastShard
from minifsdp.rows import Rows
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op
from minifsdp.strategies import (
    choose_strategies,
    comm_of,
    source_of,
    stages_of,
    view_maker_of,
)
from minifsdp.support.marked_views import MarkedPieceViews, MarkedSplitViews
from minifsdp.support.piece_views import PieceViews
from minifsdp.support.shard_changes import ShardChanges
from minifsdp.users_comm import UsersCollectives, UsersComm
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
            for purpose in (Purpose.TRAIN, Purpose.EVAL, Purpose.LOOK, Purpose.TRAIN):
                lone.unit.choose_precision(purpose)
                unshard(lone.unit, lone.streams)
                wait_for_unshard(lone.unit)
                dtype = torch.bfloat16 if purpose is Purpose.TRAIN else torch.float32
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
        model.engine.start(Purpose.TRAIN)
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


# ------------------------------------------------------------- how it travels, and its views


def rows(*shapes, ranks):
    """What the choice asks of a unit in rows."""
    layout = Rows([torch.Size(shape) for shape in shapes], [True] * len(shapes), ranks)
    group = object() if ranks > 1 else None
    return SimpleNamespace(layout=layout, shard_group=group, users_comm=UsersComm(), param_infos=())


@pytest.mark.direct
@pytest.mark.parametrize("native", [False, True], ids=["", "native"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_how_a_unit_travels_depends_on_the_device_and_on_its_layout(kind, native, monkeypatch):
    monkeypatch.setattr(collectives, "NATIVE", native)
    here = torch.device(kind)
    torchs = [TorchCollectives, Watched]
    direct = [DirectMessages] if kind == "cpu" and not native else None
    with lone_unit() as lone:
        assert chain(comm_of(lone.unit, here)) == (direct or torchs)
    assert chain(comm_of(rows([4, 2], ranks=2), here)) == (direct or torchs)  # one block
    assert chain(comm_of(rows([4, 2], [3], ranks=2), here)) == (direct or [*torchs, InBlocks])
    one, two = rows([4, 2], ranks=2), rows([4, 2], [3], ranks=2)
    one.users_comm.reduce_group = two.users_comm.all_gather = object()
    torchs.insert(1, UsersCollectives)
    assert chain(comm_of(one, here)) == (direct or torchs)  # messages have no group to wait for
    assert chain(comm_of(two, here)) == [*torchs, InBlocks]


@pytest.mark.direct
@pytest.mark.parametrize("native", [False, True], ids=["", "native"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_only_what_is_reduced_by_direct_messages_stays_in_pieces(ranks, kind, native, monkeypatch):
    monkeypatch.setattr(collectives, "NATIVE", native)
    here = torch.device(kind)
    pieces = ranks > 1 and kind == "cpu" and not native
    with lone_unit(ranks=ranks) as lone:
        assert type(view_maker_of(lone.unit, here)) is (PieceViews if pieces else SplitViews)
    one, two = rows([4, 2], ranks=ranks), rows([4, 2], [3], ranks=ranks)
    assert type(view_maker_of(one, here)) is (PieceViews if pieces else SplitViews)
    assert type(view_maker_of(two, here)) is (MarkedPieceViews if pieces else MarkedSplitViews)


@pytest.mark.direct
def test_units_keep_gradients_apart():
    with lone_unit() as a, lone_unit() as b:
        choose_strategies([a.unit, b.unit], a.streams)
        assert a.unit.view_maker is not b.unit.view_maker


# ---------------------------------------------------------------- the stages of a reduction

CAST = MixedPrecision(torch.bfloat16, torch.float32)
HALVES = ["FirstHalf on replicate", "SecondHalf on replicate"]
FIRST = ["FirstHalf on reduce", "SecondHalf on replicate"]
CASES = [
    ({}, ["ReduceScatter on reduce"]),
    ({"ranks": 1, "replicas": 2}, FIRST),
    ({"replicas": 2}, ["ReduceScatter on reduce", *HALVES]),
    ({"precision": MixedPrecision(torch.bfloat16)}, ["ReduceScatter on reduce"]),
    ({"precision": CAST}, ["Cast on reduce", "ReduceScatter on reduce"]),
    ({"offload": True}, ["ReduceScatter on reduce", "Download on download"]),
    ({"ranks": 1, "replicas": 2, "offload": True}, [*FIRST, "Download on download"]),
    (
        {"replicas": 2, "precision": CAST, "offload": True},
        ["Cast on reduce", "ReduceScatter on reduce", *HALVES, "Download on download"],
    ),
]


def names(stages) -> list[str]:
    return [f"{type(stage).__name__} on {stage.stream}" for stage in stages]


@pytest.mark.direct
@pytest.mark.parametrize("settings, expected", CASES, ids=str)
def test_a_unit_has_the_stages_that_it_needs_and_no_others(settings, expected):
    with lone_unit(**settings) as lone:
        assert names(stages_of(lone.unit, lone.streams)) == expected


@pytest.mark.direct
def test_a_hook_takes_the_place_of_every_collective():
    for settings in ({}, {"ranks": 1, "replicas": 2}):
        with lone_unit(precision=CAST, offload=True, **settings) as lone:
            lone.unit.comm_hook = hook = object()
            cast, reduce, download = stages_of(lone.unit, lone.streams)
            assert reduce is hook
            assert names([cast, download]) == ["Cast on reduce", "Download on download"]


@pytest.mark.direct
def test_only_the_last_stage_is_on_the_host_and_only_a_cast_does_not_travel():
    with lone_unit(replicas=2, precision=CAST, offload=True) as lone:
        stages = stages_of(lone.unit, lone.streams)
        assert [stage.on_host for stage in stages] == [False, False, False, False, True]
        assert [stage.travels for stage in stages] == [False, True, True, True, True]


@pytest.mark.direct
def test_where_an_all_reduce_is_one_collective_it_is_one_stage(monkeypatch):
    monkeypatch.setattr(collectives, "NATIVE", True)  # torch's own, as on a GPU
    for settings, stream in ({"replicas": 2}, "replicate"), ({"ranks": 1, "replicas": 2}, "reduce"):
        with lone_unit(**settings) as lone:
            assert names(stages_of(lone.unit, lone.streams))[-1:] == [f"AllReduce on {stream}"]


@on_ranks(1)
def test_they_are_those_of_the_device_that_the_model_is_on():
    """Another kind of device, such as a GPU, has an all-reduce that is one collective."""
    engine = stack(sharding_strategy=ShardingStrategy.NO_SHARD).engine
    with patch.dict(
        BACKENDS, meta=lambda device: Streams(device, *(CpuStream() for _ in range(6)))
    ):
        engine.layer(ShardChanges).follow_to(torch.device("meta"))
    for unit in engine.units:
        assert names(unit.stages) == ["AllReduce on reduce"]
        assert chain(unit.comm)[:2] == [TorchCollectives, Watched]
        assert type(unit.view_maker) is SplitViews


@on_ranks(2)
def test_they_are_chosen_for_the_device_that_computes_and_not_anew_for_each_reduction():
    model = stack(sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True))
    model.engine.start(Purpose.TRAIN)
    chosen = [unit.stages for unit in model.engine.units]
    number = 2 if collectives.direct(device()) else 1
    assert all(len(stages) == number + 1 for stages in chosen)
    model.engine.start(Purpose.TRAIN)
    assert all(u.stages is s for u, s in zip(model.engine.units, chosen, strict=True))

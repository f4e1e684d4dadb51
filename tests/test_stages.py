"""stages.py: which stages the reduction of a unit has."""

from unittest.mock import patch

import pytest
import torch

from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from minifsdp.comm import collectives
from minifsdp.stages import stages_of
from minifsdp.streams import BACKENDS, CpuStream, Streams
from tests.lone_unit import lone_unit
from tests.ranks import device, on_ranks
from tests.small import stack

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
        engine._compute_on(torch.device("meta"))
    assert all(names(unit.stages) == ["AllReduce on reduce"] for unit in engine.units)


@on_ranks(2)
def test_they_are_chosen_for_the_device_that_computes_and_not_anew_for_each_reduction():
    model = stack(sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True))
    model.engine.start(training=True)
    chosen = [unit.stages for unit in model.engine.units]
    number = collectives.halves(device())
    assert all(len(stages) == number + 1 for stages in chosen)
    model.engine.start(training=True)
    assert all(u.stages is s for u, s in zip(model.engine.units, chosen, strict=True))

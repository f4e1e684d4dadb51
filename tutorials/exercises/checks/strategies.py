"""Checks of strategies.py: what one unit gets for its settings, a virtual GPU, and two ranks."""

from collections.abc import Iterator
from typing import Any

import torch

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import of_training
from tutorials.exercises.observe import at_most

SHARDED: dict[str, dict[str, Any]] = {
    "2 ranks": {},
    "not sharded, 2 replicas": {"ranks": 1, "replicas": 2},
    "2 ranks, 2 replicas": {"replicas": 2},
}


def _settings() -> Iterator[tuple[str, dict[str, Any]]]:
    from minifsdp import MixedPrecision

    bf16 = torch.bfloat16
    low = {
        "": None,
        ", param_dtype": MixedPrecision(bf16),
        ", reduce_dtype": MixedPrecision(reduce_dtype=bf16),
        ", param_dtype and reduce_dtype": MixedPrecision(bf16, torch.float32),
    }
    for about, groups in SHARDED.items():
        for words, precision in low.items():
            for offload in (False, True):
                settings = {**groups, "precision": precision, "offload": offload}
                yield about + words + ", offload" * offload, settings


def _chosen(what: str, want: Any, got: Any) -> str | None:
    if "seconds" in what:
        return "a host casts slowly: upload the shard as it is, and cast it on the device"
    if not isinstance(got, list):
        return None
    if "NoneType" in got:
        return "a source is returned, or a list of stages"
    more, fewer = ([x for x in a if x not in b] for a, b in ((got, want), (want, got)))
    if "CastShard" in more:
        return (
            "a shard is cast if there is a param_dtype, and if it is sent: without a group it is "
            "copied, and copy_() casts on the way"
        )
    if more or fewer:
        return (
            f"{', '.join(more or fewer)} is {'not needed' if more else 'missing'} here. Which of "
            f"the unit's groups, dtypes and offload does it depend on"
        )
    if "source" in what:
        return "from the inside outwards: the shard is uploaded, and then cast on the device"
    return "first the cast, then what travels, within the shard group first, and last the download"


def _source_names(source: Any) -> list[str]:
    inner = _source_names(source.inner) if hasattr(source, "inner") else []
    return [*inner, type(source).__name__]


@check("strategies.1", because=_chosen)
def what_a_unit_gets() -> Iterator[Any]:
    from minifsdp import MixedPrecision
    from minifsdp.strategies import source_of, stages_of
    from tests.lone_unit import lone_unit

    for about, settings in _settings():
        with lone_unit(**settings) as lone:
            source = source_of(lone.unit)
            yield f"source, from the inside outwards, {about}", _source_names(source)
            yield (
                f"whether its group is the shard group, {about}",
                source.group is (lone.unit.shard_group),
            )
            stages = stages_of(lone.unit, lone.streams)
            yield f"stages, {about}", [type(stage).__name__ for stage in stages]
            yield f"streams of the stages, {about}", [stage.stream for stage in stages]
    with lone_unit(ranks=1, precision=MixedPrecision(torch.bfloat16)) as lone:
        lone.unit.mixed = object()  # type: ignore[assignment]
        names = _source_names(source_of(lone.unit))
        yield "source of a unit of several dtypes (unit.mixed), without a group, param_dtype", names


def _in_steps(what: str, want: Any, got: Any) -> str | None:
    return _chosen(what, want, got) if "seconds" in what else of_training(what, want, got)


@check("strategies.1", because=_in_steps)
def on_a_gpu() -> Iterator[Any]:
    from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
    from tutorials.exercises.virtual import train

    bf16 = MixedPrecision(torch.bfloat16)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        settings = {"sharding_strategy": strategy, "hardware": {"gpus_per_node": 2}}
        gpu = train(cpu_offload=CPUOffload(True), mixed_precision=bf16, **settings)
        about = f"with {strategy.name}, offload and bf16"
        yield f"races in a step {about}", [str(race) for race in gpu.races()][:1]
        yield at_most(f"seconds of a step {about}", gpu.report()["step"], slack=0.02)


@check("strategies.1", ranks=2, because=_in_steps)
def two_ranks_train() -> Iterator[Any]:
    from minifsdp import CPUOffload, ShardingStrategy
    from tutorials.exercises import parallel

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        yield from parallel.train(sharding_strategy=strategy, cpu_offload=CPUOffload(True))

"""The last check: all of the student's functions at once."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import check
from tutorials.exercises.judge import of_training


@check("together.1", ranks=2, seconds=20, because=of_training)
def two_ranks_train() -> Iterator[Any]:
    from minifsdp import CPUOffload, ShardingStrategy
    from tutorials.exercises import parallel

    for strategy in ShardingStrategy:
        if "HYBRID" not in strategy.name:
            for offload in (None, CPUOffload(True)):
                yield from parallel.train(sharding_strategy=strategy, cpu_offload=offload)


def _gpu(what: str, want: Any, got: Any) -> str | None:
    if "races" in what:
        return "a wait is missing somewhere between two of your functions"
    return "each function is right, and together they are slower: who waits too early"


@check("together.1", because=_gpu)
def on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.observe import at_most
    from tutorials.exercises.virtual import train

    gpu = train(steps=4)
    yield "races in a training step", [str(race) for race in gpu.races()][:1]
    yield at_most("seconds of a training step", gpu.report()["step"], slack=0.02)
    yield at_most("units alive", gpu.report()["peak unsharded units"])
    yield at_most("bytes that tensors take", gpu.report()["peak allocated"], slack=0.02)
    yield at_most("reserved bytes", gpu.report()["peak reserved"], slack=0.02)

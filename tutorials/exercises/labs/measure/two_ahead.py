"""Small and large units in turn, on a virtual GPU with a slow network."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure, on_gpu
from tutorials.exercises.observe import at_most

WIDTHS = [512, 2048] * 6


def on_a_gpu() -> Iterator[Any]:
    """There is room for three units, so two can be gathered while one computes."""
    from tutorials.exercises.virtual import train

    gpu = train(WIDTHS, rows=2048, hardware={"network": 12.5e9}, limit_all_gathers=3)
    figures = gpu.report()
    yield from on_gpu(gpu)
    yield at_most("units alive", figures["peak unsharded units"])
    yield at_most("reserved bytes", figures["peak reserved"], slack=0.01)
    yield at_most("prefetches of a wrong unit", figures["mistargeted prefetches"])
    yield figure(figures["step"] * 1e3)


def on_two_ranks() -> Iterator[Any]:
    """Real values, and ranks that have to prefetch in the same order."""
    from tutorials.exercises import parallel

    yield from parallel.train(limit_all_gathers=3)


CHECKS = [Check(on_a_gpu, 1, 20, because), Check(on_two_ranks, 2, 20, because)]

"""Many small units and two large ones in a row, on a virtual GPU."""

from collections.abc import Iterator
from typing import Any

from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure, on_gpu

WIDTHS = [768] * 24 + [3072] * 2 + [768] * 24


def _limiter() -> Any:
    """What the file that is measured has; where there is none, a limit of two units."""
    from minifsdp.core import limiter

    return limiter.ByteLimiter() if hasattr(limiter, "ByteLimiter") else 2


def on_a_gpu() -> Iterator[Any]:
    from tutorials.exercises.virtual import train

    gpu = train(WIDTHS, rows=1024, hardware={"network": 200e9}, limit_all_gathers=_limiter())
    yield from on_gpu(gpu)
    yield figure(gpu.report()["peak reserved"] / 2**20)


def on_two_ranks() -> Iterator[Any]:
    """Real values: a limiter that declines too much, or differs from rank to rank, shows here."""
    from tutorials.exercises import parallel

    yield from parallel.train(limit_all_gathers=_limiter())


CHECKS = [Check(on_a_gpu, 1, 20, because), Check(on_two_ranks, 2, 20, because)]

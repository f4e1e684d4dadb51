"""Constants from samples: times that are a sum of two parts, each of which is in proportion to
something that is known.

Each cost in hardware/costs.py is of this form, if it is written the right way:

- a pass over memory: ``calls x launch + bytes / bandwidth``
- a product: ``flops / peak + (flops / inner size) x (tile overhead / peak)``
- attention: ``flops / peak + (flops / keys) x (row overhead / peak)``
- a collective: ``steps x latency + bytes / bandwidth``

So one fit serves all of them. It makes *relative* errors small: else the longest sample alone would
decide.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """``seconds`` are about ``first x a + second x b``."""

    first: float
    second: float
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """``a`` and ``b``, neither below 0, with the least sum of squared relative errors.

    Raises:
        ValueError: there are no samples, or some are not positive.
    """
    if not samples or any(s.seconds <= 0 or s.first + s.second <= 0 for s in samples):
        raise ValueError("constants need samples that take some time")
    rows = [(s.first / s.seconds, s.second / s.seconds) for s in samples]  # want: a x + b y = 1
    xx, yy = sum(x * x for x, _ in rows), sum(y * y for _, y in rows)
    xy = sum(x * y for x, y in rows)
    sx, sy = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (sx * yy - sy * xy) / determinant, (sy * xx - sx * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # One of them explains nothing that the other does not explain: which one is the better?
    alone = [(sx / xx if xx else 0.0, 0.0), (0.0, sy / yy if yy else 0.0)]
    return min(alone, key=lambda ab: sum((ab[0] * x + ab[1] * y - 1) ** 2 for x, y in rows))

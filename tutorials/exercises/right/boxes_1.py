"""Right: from the left, always the largest box that begins here and ends inside of the range."""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    sizes = [prod(shape[d + 1 :]) for d in range(len(shape))]  # of one step in each dimension
    while start < stop:
        if not shape:
            yield (), ()
            return
        at = [start // size % length for size, length in zip(sizes, shape, strict=True)]
        d = next(d for d, n in enumerate(sizes) if start % n == 0 and start + n <= stop)
        steps = min((stop - start) // sizes[d], shape[d] - at[d])
        yield tuple(at), (*(1 for _ in shape[:d]), steps, *shape[d + 1 :])
        start += steps * sizes[d]

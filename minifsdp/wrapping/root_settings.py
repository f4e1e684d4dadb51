"""The arguments of one ``FullyShardedDataParallel`` that decide how a step runs: how many units may
be unsharded at once, and which are gathered ahead. They count for the outermost wrapper only.
"""

from minifsdp.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.limiter import EventQueue, Limiter, NoLimit
from minifsdp.prefetch import Prefetcher


def make_limiter(limit: bool | int | Limiter) -> Limiter:
    """The limiter for the argument ``limit_all_gathers``.

    Args:
        limit: True for at most 2 units, False for no limit, a number of units, or a limiter, which
            is returned as it is.

    Raises:
        ValueError: the number is less than 1.
        TypeError: it is something else, such as None or "2".
    """
    if limit is False:
        return NoLimit()
    if limit is True:
        return EventQueue(2)
    if isinstance(limit, int):
        if limit < 1:
            raise ValueError(
                f"limit_all_gathers={limit}: at least 1 unit must be alive to compute with it. "
                f"Use False for no limit."
            )
        return EventQueue(limit)
    if isinstance(limit, type) or not isinstance(limit, Limiter):
        raise TypeError(
            f"limit_all_gathers={limit!r}: expected True (at most 2 units alive), False (no limit),"
            f" a number of units, or a minifsdp.Limiter, which has the methods admit and freed."
        )
    return limit


def make_prefetcher(
    backward: BackwardPrefetch | None,
    forward: bool | ForwardPrefetch | None,
    kind: type[Prefetcher] = Prefetcher,
) -> Prefetcher:
    """The prefetcher for the arguments ``backward_prefetch`` and ``forward_prefetch``.

    Args:
        forward: True is FORWARD_PRE, False is no prefetching. None is FORWARD_PRE on a device whose
            host does not run ahead, and no prefetching elsewhere.
        kind: the class to make one of.

    Raises:
        TypeError: an argument is something else.
    """
    prefetcher = kind(backward, ForwardPrefetch.FORWARD_PRE if forward is True else forward or None)
    prefetcher.forward_where_it_helps = forward is None
    return prefetcher

"""The arguments of one ``FullyShardedDataParallel`` that decide how a step runs: how many units may
be unsharded at once, and which are gathered ahead. Only those of the outermost wrapper are used.
"""

from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.core.limiter import Limiter, limiter_of
from minifsdp.core.prefetch import forward_prefetch_of
from minifsdp.support.prefetch_stats import CountedPrefetcher


def make_limiter(limit: bool | int | Limiter) -> Limiter:
    """The limiter for the argument ``limit_all_gathers``.

    Args:
        limit: True for PyTorch's limit, False for none, a number of units, or a limiter, which is
            returned as it is.

    Raises:
        ValueError: the number is less than 1.
        TypeError: it is something else, such as None or "2".
    """
    if isinstance(limit, int) and limit is not False and limit < 1:
        raise ValueError(
            f"limit_all_gathers={limit}: at least 1 unit must be alive to compute with it. "
            f"Use False for no limit."
        )
    if isinstance(limit, type) or not isinstance(limit, (int, Limiter)):
        raise TypeError(
            f"limit_all_gathers={limit!r}: expected True (as in PyTorch: 2 units, and one that is "
            f"being freed), False (no limit), a number of units, or a minifsdp.Limiter, which has "
            f"the methods admit and freed."
        )
    return limiter_of(limit)


def make_prefetcher(
    backward: BackwardPrefetch | None,
    forward: bool | ForwardPrefetch | None,
    kind: type[CountedPrefetcher] = CountedPrefetcher,
) -> CountedPrefetcher:
    """The prefetcher for the arguments ``backward_prefetch`` and ``forward_prefetch``; see
    :func:`~minifsdp.core.prefetch.forward_prefetch_of`. The device is known later.

    Args:
        kind: the class to make one of.

    Raises:
        TypeError: an argument is something else, such as torch's enum of the same name.
    """
    made = kind(backward, forward_prefetch_of(forward, host_runs_ahead=True))
    made.forward_where_it_helps = forward is None
    for given, enum in ((made.backward, BackwardPrefetch), (made.forward, ForwardPrefetch)):
        if given is not None and not isinstance(given, enum):
            raise TypeError(
                f"{given!r} is not one of minifsdp.{enum.__name__}'s members, nor None (do not "
                f"prefetch)"
            )
    return made

"""One 1-D tensor <-> world_size chunks.

A flat parameter is cut into chunks of equal size, one for each rank. Equal, because collectives
are fastest, and on NCCL only possible, when all ranks send the same amount; so the end is padded::

    flat     [5]          a b c d e
    padded   [8]          a b c d e 0 0 0         4 ranks: chunks of ceil(5 / 4) = 2
    rank               0:[a b] 1:[c d] 2:[e 0] 3:[0 0]
    the optimizer sees 0:[a b] 1:[c d] 2:[e]   3:[]

The padding travels with its chunk, but the parameter that the optimizer gets ends where the data
ends: noise, weight decay or a norm taken over the shard never meets an element that does not exist.

Nothing here talks to another rank.
"""

from torch import Tensor


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements in each rank's chunk, padding included."""
    return -(-numel // world_size)


def real_numel(numel: int, rank: int, world_size: int) -> int:
    """Elements in the chunk of ``rank`` that are data and not padding; 0 past the end."""
    chunk = chunk_numel(numel, world_size)
    return min(max(numel - rank * chunk, 0), chunk)


def shard(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """The chunk of ``flat`` that belongs to ``rank``.

    Args:
        flat: ``[n]``.

    Returns:
        A new tensor ``[ceil(n / world_size)]``, zero where there is padding. It shares no memory
        with ``flat``: a view would keep all of it alive, and nothing would be saved.
    """
    size, real = chunk_numel(flat.numel(), world_size), real_numel(flat.numel(), rank, world_size)
    chunk = flat.new_zeros(size)
    chunk[:real] = flat[rank * size : rank * size + real]
    return chunk

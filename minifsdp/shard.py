"""Shard: one 1-D tensor <-> one shard for each rank.

A flat parameter is divided into *padded shards* of equal size, one for each rank. Collectives are
fastest if all ranks send the same number of elements, and NCCL's require it. So zeros are appended
until the length is a multiple of the number of ranks::

    flat parameter   [5]   a b c d e
    padded           [8]   a b c d e 0 0 0                4 ranks: ceil(5 / 4) = 2 elements each
    padded shards    [2]   0: [a b] 1: [c d] 2: [e 0] 3: [0 0]
    shards                 0: [a b] 1: [c d] 2: [e]   3: []

Collectives send padded shards. The optimizer gets the shards, without the padding: otherwise noise,
weight decay or a norm of the parameters would depend on elements that the model does not have.

Nothing here communicates with other ranks.
"""

from torch import Tensor


def padded_shard_numel(numel: int, world_size: int) -> int:
    """Elements in the padded shard of each rank.

    Args:
        numel: elements of the flat parameter, without padding.
        world_size: ranks that share it.
    """
    return -(-numel // world_size)


def unpadded_shard_numel(numel: int, rank: int, world_size: int) -> int:
    """Elements in the shard of ``rank``, without padding; 0 if all of it is padding.

    Args:
        numel, world_size: as in :func:`padded_shard_numel`.
    """
    padded = padded_shard_numel(numel, world_size)
    return min(max(numel - rank * padded, 0), padded)


def shard(flat: Tensor, rank: int, world_size: int) -> Tensor:
    """The padded shard of ``rank``.

    Args:
        flat: ``[numel]``, without padding.

    Returns:
        A new tensor ``[ceil(numel / world_size)]``, of the same dtype and on the same device; the
        padding is zero. It shares no memory with ``flat``. A view would keep all of ``flat`` alive,
        so that sharding would save nothing.
    """
    size = padded_shard_numel(flat.numel(), world_size)
    unpadded = unpadded_shard_numel(flat.numel(), rank, world_size)
    padded_shard = flat.new_zeros(size)
    padded_shard[:unpadded] = flat[rank * size : rank * size + unpadded]
    return padded_shard

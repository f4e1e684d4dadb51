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

from collections.abc import Sequence

import torch
from torch import Tensor

from .flatten import flatten, unflatten


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


class Chunks:
    """Where the shards of a unit are in its unsharded flat parameter: one block for each rank.
    :class:`~minifsdp.rows.Rows` is the other way to divide a unit, with the same methods.

    Args:
        shapes: of the unit's parameters.
        world_size: ranks that share it.

    Attributes:
        padded_numel: elements of the unsharded flat parameter.
    """

    def __init__(self, shapes: Sequence[torch.Size], world_size: int) -> None:
        self.shapes, self.world_size = shapes, world_size
        self.numel = sum(shape.numel() for shape in shapes)
        self.padded_numel = padded_shard_numel(self.numel, world_size) * world_size

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new tensor ``[numel]``; see flatten.py."""
        return flatten(tensors) if tensors else torch.empty(0)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, ``[padded_numel]``, one for each parameter."""
        return unflatten(flat, self.shapes)

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The padded shard of ``rank``, ``[padded_numel / world_size]``."""
        return shard(flat, rank, self.world_size)

    def optimized_numel(self, rank: int) -> int:
        """How many elements of the padded shard of ``rank`` are not padding."""
        return unpadded_shard_numel(self.numel, rank, self.world_size)

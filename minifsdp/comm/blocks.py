"""Where the blocks of each rank are in a tensor that all ranks have.

A tensor of which each rank sends or keeps a part is made of *blocks*. There is a list of sizes, and
for each size a block of every rank, one after the other::

    blocks = [n]       0 0 0 1 1 1 2 2 2              one block for each rank: a chunk
    blocks = [2, 1]    0 0 1 1 2 2 | 0 1 2            each rank's block of two parameters

    blocks = [Columns(4, 2)]       0 0 1 1 | 0 0 1 1  each rank's block in two segments

What one rank has is contiguous in its own shard (``0 0 0``), and not in the second tensor. gloo's
messages go from each block to its place. NCCL's collectives need one piece of memory for each rank,
so the blocks are copied together before a collective, or apart after it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Blocks = Sequence[int]
"""Elements of one rank's block, for each of the parts that a tensor is made of."""


class Columns(int):
    """A block that lies in segments: a matrix that is divided between columns has a piece in each
    row. Its value as a number is how many elements it has.

    Attributes:
        segments: how many.
    """

    segments: int

    def __new__(cls, numel: int, segments: int) -> "Columns":
        made = super().__new__(cls, numel)
        made.segments = segments
        return made

    def __mul__(self, factor: int) -> "Columns":
        """The same block in another unit, such as bytes."""
        return Columns(int(self) * factor, self.segments)


def in_one_piece(blocks: Blocks | None) -> bool:
    """Whether what each rank has is in one piece in the tensor of all ranks."""
    return blocks is None or (len(blocks) < 2 and Columns not in map(type, blocks))


def by_rank(flat: Tensor, blocks: Blocks | None, world_size: int) -> list[list[Tensor]]:
    """Views of the blocks, a list for each rank.

    Args:
        flat: ``[world_size * sum(blocks)]``.
        blocks: without ``Columns``. None is one block for each rank; then ``flat`` may have any
            number of elements, and the first ranks have one more where they cannot have the same.
        world_size: 1 if ``flat`` is what one rank has.
    """
    if blocks is None:
        return [[chunk] for chunk in flat.tensor_split(world_size)]
    parts = [matrix.unbind() for matrix in _matrices(flat, blocks, world_size)]
    return [list(of_one_rank) for of_one_rank in zip(*parts, strict=True)]


def of_rank(flat: Tensor, blocks: Blocks | None, world_size: int, rank: int) -> Tensor:
    """A copy of the blocks of one rank, end to end.

    Args:
        flat: ``[world_size * n]``.
        blocks, world_size: as in :func:`by_rank`, which would make views for all ranks.
    """
    blocks = [flat.numel() // world_size] if blocks is None else blocks
    return torch.cat([matrix[rank].reshape(-1) for matrix in _matrices(flat, blocks, world_size)])


def together(flat: Tensor, blocks: Blocks | None, world_size: int) -> Tensor:
    """A copy of ``flat`` in which the blocks of each rank are contiguous; ``flat`` itself where
    they are already.

    Args:
        flat: ``[world_size * sum(blocks)]``.
    """
    if blocks is None or in_one_piece(blocks):
        return flat
    matrices = _matrices(flat, blocks, world_size)
    if Columns in map(type, blocks):
        matrices = [matrix.flatten(1) for matrix in matrices]
    return torch.cat(matrices, dim=1).view(-1)


def copy_apart(gathered: Tensor, flat: Tensor, blocks: Blocks, world_size: int) -> None:
    """Copy the result of :func:`together` back to the places where its blocks were.

    Args:
        gathered: ``[world_size * sum(blocks)]``, the blocks of rank 0, then of rank 1, ...
        flat: of the same shape; written.
    """
    out, rows = _matrices(flat, blocks, world_size), gathered.view(world_size, -1)
    if Columns not in map(type, blocks):
        torch.split_with_sizes_copy(rows, list(blocks), dim=1, out=out)
        return
    for to, part in zip(out, torch.split(rows, list(blocks), dim=1), strict=True):
        to.copy_(part.view(to.shape))


def _matrices(flat: Tensor, blocks: Blocks, world_size: int) -> list[Tensor]:
    """Each part of ``flat`` as ``[world_size, block]``; of ``Columns``, as
    ``[world_size, segments, elements of one]``."""
    parts = torch.split(flat, [block * world_size for block in blocks])
    return [
        part.view(world_size, block)
        if type(block) is not Columns
        else part.view(block.segments, world_size, -1).transpose(0, 1)
        for part, block in zip(parts, blocks, strict=True)
    ]

"""Rows: the other way to divide a unit. Each rank has a block of rows of *every* parameter.

shard.py lays all parameters end to end and cuts the whole into chunks, as FSDP1 does. A chunk is a
piece of a vector: it may begin in the middle of one matrix and end in the middle of the next, so it
has no name and no shape. FSDP2 cuts each parameter for itself, between two of its rows::

    parameters       weight [3, 2]  a a    bias [3]  x         2 ranks
                                    b b              y
                                    c c              z

    chunks (FSDP1)   rank 0: a a b b c         rank 1: c x y z 0
    rows   (FSDP2)   rank 0: a a b b  x y      rank 1: c c 0 0  z 0

What a rank has of a parameter is a part of a matrix: a ``DTensor`` with the parameter's own name
and shape, sharded along its first dimension. So an optimizer can treat biases in another way than
weights, a part of a unit can be frozen, and other programs can read a checkpoint.

The unsharded flat parameter is what it is with chunks: whole parameters end to end. Only the zeros
are in other places, after each parameter, where they fill the blocks of the last ranks::

    unsharded        a a b b c c 0 0   x y z 0         blocks of 4 and of 2 elements

So a block lies in one piece there, and collectives exchange blocks (comm/blocks.py). Parameters
that are frozen come last. Then what has a gradient is one piece, too, and no memory and no message
is spent on gradients of the others.

Sources: pytorch/pytorch#114299, "per-parameter-sharding FSDP"; Liang et al., "TorchTitan",
arXiv:2410.06511. PyTorch copies what it has gathered to a tensor for each parameter. To keep the
parameters in one tensor, with zeros in between, is ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.blocks import of_rank
from minifsdp.flatten import check_flattenable
from minifsdp.shard import padded_shard_numel, unpadded_shard_numel


def check_divisible(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors can be divided in rows, and be parts of one unsharded flat parameter.

    Args:
        tensors: fully qualified name -> parameter, for all parameters of one unit.

    Raises:
        ValueError: one of them has no dimension, so it has no rows; or they differ in dtype or
            device. They may differ in ``requires_grad``.
    """
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise ValueError(
                f"parameter {name!r} has no dimension, so it has no rows to divide among ranks. "
                f"Make it a vector of one element (its shape [] is then [1]); or leave it as it is "
                f"on each rank, with ignored_params={{...}} of fully_shard or ignored_states=[...] "
                f"of FullyShardedDataParallel (its gradient is not reduced then); or cut units in "
                f"chunks, with FullyShardedDataParallel(..., use_orig_params=False)."
            )
    check_flattenable({name: tensor.detach() for name, tensor in tensors.items()})


def local_shape(shape: torch.Size, rank: int, world_size: int) -> torch.Size:
    """The shape of what ``rank`` has of a parameter: some of its rows, or none.

    Args:
        shape: of the parameter; at least one dimension.
    """
    return torch.Size((unpadded_shard_numel(shape[0], rank, world_size), *shape[1:]))


def block_numel(shape: torch.Size, world_size: int) -> int:
    """Elements in each rank's block of a parameter: as many rows as rank 0 has, which has most."""
    return padded_shard_numel(shape[0], world_size) * shape[1:].numel()


class Rows:
    """Where the parameters of a unit are in its unsharded flat parameter.

    Args:
        shapes: of the parameters. Each has at least one dimension.
        trained: whether each of them has a gradient. These are laid end to end first.
        world_size: ranks that share the unit.

    Attributes:
        order: the numbers of the parameters, in the order in which they are laid.
        blocks: elements in each rank's block, in that order.
        trained_blocks: those of the parameters that have a gradient; of all, if none has.
        padded_numel: elements of the unsharded flat parameter.
        trained_numel: how many of them can have a gradient: the first ones.
        sizes: of each parameter among these, and of the padding after it.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], trained: Sequence[bool], world_size: int
    ) -> None:
        self.param_shapes, self.trained, self.world_size = shapes, list(trained), world_size
        self.order = sorted(range(len(shapes)), key=lambda number: not trained[number])
        self.shapes = [shapes[number] for number in self.order]
        self.blocks = [block_numel(shape, world_size) for shape in self.shapes]
        self.trained_blocks = self.blocks[: sum(trained) or len(shapes)]
        self.padded_numel = sum(self.blocks) * world_size
        self.trained_numel = sum(self.trained_blocks) * world_size
        self.sizes = self._sizes()[: 2 * len(self.trained_blocks)]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors of these shapes.

        Returns:
            A new tensor ``[padded_numel]`` of their dtype and on their device, which needs no
            gradient. The padding is zero.
        """
        flat = tensors[0].new_zeros(self.padded_numel, requires_grad=False)
        for view, tensor in zip(self.unflatten(flat), tensors, strict=True):
            view.copy_(tensor.detach())
        return flat

    def unflatten(self, flat: Tensor, frozen: Tensor | None = None) -> list[Any]:
        """Views of the unsharded flat parameter, one for each parameter. The gradient of the
        padding is zero.

        Args:
            flat: ``[padded_numel]``; or only the part of it that has a gradient.
            frozen: the other part. If it is left out, there is None for each parameter in it.
        """
        sizes, trained = self._sizes(), len(self.sizes)
        if flat.numel() == self.padded_numel:
            pieces = torch.split(flat, sizes)
        else:
            pieces = torch.split(flat, sizes[:trained])
            pieces += () if frozen is None else torch.split(frozen, sizes[trained:])
        return self._in_order([p.view(s) for p, s in zip(pieces[::2], self.shapes, strict=False)])

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """The blocks of ``rank`` end to end.

        Args:
            flat: ``[padded_numel]``.

        Returns:
            A new tensor ``[padded_numel / world_size]``.
        """
        return of_rank(flat, self.blocks, self.world_size, rank)

    def optimized_numel(self, rank: int) -> int:
        """How many elements of the shard have a gradient: the first ones. All, if none has."""
        return sum(self.trained_blocks)

    def local_tensors(self, shard: Tensor, rank: int) -> list[Any]:
        """What ``rank`` has of each parameter: views of its shard, without padding.

        Args:
            shard: ``[padded_numel / world_size]``, or only the part of it that has a gradient. Then
                there is None for the parameters that have none.
        """
        blocks = self.blocks if shard.numel() == sum(self.blocks) else self.trained_blocks
        found = []
        for shape, piece in zip(self.shapes, torch.split(shard, blocks), strict=False):
            local = local_shape(shape, rank, self.world_size)
            found.append(piece[: local.numel()].view(local))
        return self._in_order(found)

    def _sizes(self) -> list[int]:
        sizes: list[int] = []
        for shape, block in zip(self.shapes, self.blocks, strict=True):
            sizes += [shape.numel(), block * self.world_size - shape.numel()]
        return sizes

    def _in_order(self, laid: list[Tensor]) -> list[Any]:
        """From the order in which parameters are laid to that of the parameters, with None for
        those that are not among ``laid``."""
        found: list[Any] = [None] * len(self.order)
        for number, tensor in zip(self.order, laid, strict=False):
            found[number] = tensor
        return found

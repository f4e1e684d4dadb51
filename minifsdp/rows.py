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
and shape, sharded along its first dimension. So an optimizer can treat biases differently from
weights, a part of a unit can be frozen, and other programs can read a checkpoint.

The unsharded flat parameter is as with chunks: whole parameters end to end. Only the zeros are in
different places: after each parameter, where they fill the blocks of the last ranks::

    unsharded        a a b b c c 0 0   x y z 0         blocks of 4 and of 2 elements

So a block lies in one piece there, and collectives exchange blocks (comm/blocks.py). Parameters
that are frozen come last. Then what has a gradient is one piece, too, and no memory and no message
is spent on gradients of the others. They may have dtypes of their own (mixed_rows.py).

A parameter that no rank has used must not get a gradient, not even zeros: weight decay or momentum
would change it. No rank knows that by itself. So a few elements for each rank, the *marks*, follow
the parameters that have a gradient, and are reduced with it. A mark is 0, or -0 on a rank that has
not used that parameter. A sum of zeros is -0 only if all of them are, exactly and in every dtype::

    gradient, rank 0   a a a a 0 0 0 0   0 0 0 0   0 -0  0 -0     bias was not used here,
    gradient, rank 1   a a a a a a 0 0   x y z 0   0  0  0  0     but on this rank it was

Sources: pytorch/pytorch#114299, "per-parameter-sharding FSDP"; Liang et al., "TorchTitan",
arXiv:2410.06511. PyTorch copies what it has gathered to a tensor for each parameter. To keep the
parameters in one tensor, with zeros in between, is ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.blocks import Columns, of_rank
from minifsdp.core.flatten import check_flattenable
from minifsdp.core.shard import padded_shard_numel, unpadded_shard_numel


def check_divisible(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors can be divided in rows, and be parts of one unsharded flat parameter.

    Args:
        tensors: fully qualified name -> parameter, for all parameters of one unit.

    Raises:
        ValueError: one of them has no dimension, so it has no rows; or they differ in device. They
            may differ in ``requires_grad``, and in dtype as far as mixed_rows.py takes them.
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
    # Bytes: dtypes and requires_grad may differ. What is not contiguous torch would refuse itself.
    as_bytes = {n: t.view(torch.uint8) if t.is_contiguous() else t for n, t in tensors.items()}
    check_flattenable(as_bytes)


def local_shape(shape: torch.Size, rank: int, world_size: int, dim: int = 0) -> torch.Size:
    """The shape of what ``rank`` has of a parameter: some of its rows, or none.

    Args:
        shape: of the parameter; at least one dimension.
        dim: the one that is divided.
    """
    part = unpadded_shard_numel(shape[dim], rank, world_size)
    return torch.Size((*shape[:dim], part, *shape[dim + 1 :]))


def block_numel(shape: torch.Size, world_size: int, dim: int = 0) -> int:
    """Elements in each rank's block of a parameter: as many rows as rank 0 has, which has most.
    Along another dimension, which the ranks divide evenly, they are in segments."""
    if dim:
        return Columns(shape.numel() // world_size, shape[:dim].numel())
    return padded_shard_numel(shape[0], world_size) * shape[1:].numel()


ALIGNED = 8  # elements, which are 16 bytes in half precision


class Rows:
    """Where the parameters of a unit are in its unsharded flat parameter.

    Args:
        shapes: of the parameters. Each has at least one dimension.
        trained: whether each of them has a gradient. Those that have are laid first.
        world_size: ranks that share the unit.
        dims: along which the parameters are divided (wrapping/shard_placement.py); None: the first.

    Attributes:
        order: the numbers of the parameters, in the order in which they are laid: those that have a
            gradient first, and in each half lengths that are no multiple of 8 last. GPUs read a
            matrix faster that begins at a multiple of 16 bytes, so no bias of 5 may come before it.
        with_grad: the first of them, which have a gradient; all, if none has.
        marks: elements of each rank's marks; 0 in a unit of one parameter, which as a whole has a
            gradient or has none. They fill up what is reduced to a multiple of 16 bytes.
        blocks: elements in each rank's block of each parameter, in that order, and of the marks.
        trained_blocks: the same for the parameters that have a gradient, and for the marks.
        padded_numel: elements of the unsharded flat parameter.
        trained_numel: how many of them can have a gradient: the first ones, and the marks.
        sizes: of each parameter among these, and of the padding or marks after some of them.
        places: of these parameters among the sizes.
        marked: which parameters have marks, by their numbers in ``with_grad``: those with elements.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        trained: Sequence[bool],
        world_size: int,
        dims: Sequence[int] | None = None,
    ) -> None:
        self.dims = dims or [0] * len(shapes)
        self.param_shapes, self.trained, self.world_size = shapes, list(trained), world_size
        each = zip(shapes, self.dims, strict=True)
        numels = [block_numel(shape, world_size, dim) for shape, dim in each]
        is_odd = [numel * world_size % ALIGNED > 0 for numel in numels]
        self.order = sorted(range(len(shapes)), key=lambda at: (not trained[at], is_odd[at]))
        self.with_grad = self.order[: sum(trained) or len(shapes)]
        self.shapes = [shapes[number] for number in self.order]
        self._dims = [self.dims[number] for number in self.order]
        blocks = [numels[number] for number in self.order]
        reduced = sum(blocks[: len(self.with_grad)]) + len(self.with_grad)
        self.marks = len(self.with_grad) + -reduced % ALIGNED if len(shapes) > 1 else 0
        self.trained_blocks = blocks[: len(self.with_grad)] + [self.marks] * (self.marks > 0)
        self.blocks = self.trained_blocks + blocks[len(self.with_grad) :]
        self.padded_numel = sum(self.blocks) * world_size
        self.trained_numel = sum(self.trained_blocks) * world_size
        self._sizes, self._places = self._all_sizes(blocks)
        self.places = self._places[: len(self.with_grad)]
        frozen = self._places[len(self.with_grad) :]
        self.sizes = self._sizes[: frozen[0]] if frozen else self._sizes
        self.marked = [number for number, place in enumerate(self.places) if self.sizes[place]]

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors of these shapes.

        Returns:
            A new tensor ``[padded_numel]`` of their dtype and on their device, which needs no
            gradient. The padding is zero.
        """
        flat = tensors[self.order[0]].new_zeros(self.padded_numel, requires_grad=False)
        for view, tensor in zip(self.unflatten(flat), tensors, strict=True):
            view.copy_(tensor.detach())
        return flat

    def unflatten(self, flat: Tensor, frozen: Tensor | None = None) -> list[Any]:
        """Views of the unsharded flat parameter, one for each parameter. The gradient of the
        padding is zero.

        Args:
            flat: ``[padded_numel]``; or only the part of it that has a gradient.
            frozen: the other part. If it is left out, the result is None for its parameters.
        """
        sizes, trained = self._sizes, len(self.sizes)
        if flat.numel() == self.padded_numel:
            pieces = torch.split(flat, sizes)
        else:
            pieces = torch.split(flat, sizes[:trained])
            pieces += () if frozen is None else torch.split(frozen, sizes[trained:])
        there = [place for place in self._places if place < len(pieces)]
        laid = zip(there, self.shapes, strict=False)
        return self._in_order([pieces[place].view(shape) for place, shape in laid])

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
        return sum(self.trained_blocks) - self.marks

    def local_tensors(self, shard: Tensor, rank: int) -> list[Any]:
        """What ``rank`` has of each parameter: views of its shard, without padding.

        Args:
            shard: ``[padded_numel / world_size]``, or only the part of it that has a gradient, with
                or without marks. Then there is None for the parameters that have none.
        """
        trained = len(self.with_grad)
        pieces = list(torch.split(shard, self._shard_sizes(shard.numel())))
        if self.marks and len(pieces) > trained:
            del pieces[trained]
        found = []
        for shape, dim, piece in zip(self.shapes, self._dims, pieces, strict=False):
            local = local_shape(shape, rank, self.world_size, dim)
            found.append(piece[: local.numel()].view(local))
        return self._in_order(found)

    def mark_unused(self, flat: Tensor, places: Sequence[int]) -> None:
        """Mark parameters as not used on this rank.

        Args:
            flat: a gradient ``[trained_numel]``, or the end of one; written. Its marks are 0.
            places: of the parameters in ``with_grad``.
        """
        marks = flat[flat.numel() - self.marks * self.world_size :].view(self.world_size, -1)
        # One by one: as a list they would be copied to the GPU, and the host would wait for that.
        for place in places:
            marks[:, place] = -0.0

    def unused(self, reduced: Tensor) -> list[int]:
        """The numbers of the parameters that no rank has used.

        Args:
            reduced: this rank's blocks of a sum or mean of gradients, ``[sum(trained_blocks)]``; or
                one rank's gradient, ``[trained_numel]``. The host waits for it.
        """
        marks = reduced[reduced.numel() - self.marks :].signbit().tolist()
        return [number for number, mark in zip(self.with_grad, marks, strict=False) if mark]

    def _shard_sizes(self, numel: int) -> list[int]:
        """Of the blocks in what a rank has, which may be all or a part of them."""
        if numel == sum(self.blocks):
            return self.blocks
        if numel == sum(self.trained_blocks):
            return self.trained_blocks
        return self.trained_blocks[: len(self.with_grad)]

    def _all_sizes(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The sizes of parameters and of what is after them, and the places of parameters."""
        sizes: list[int] = []
        places: list[int] = []
        for shape, block in zip(self.shapes, blocks, strict=True):
            places.append(len(sizes))
            after = block * self.world_size - shape.numel()
            if len(places) == len(self.with_grad):
                after += self.marks * self.world_size
            # No empty pieces: autograd would make a gradient of zeros for each of them, which takes
            # the host as long as a gradient with elements.
            sizes += [shape.numel(), after] if after else [shape.numel()]
        return sizes, places

    def _in_order(self, laid: list[Tensor]) -> list[Any]:
        """From the order in which parameters are laid to their own order, with None for those that
        are not among ``laid``."""
        found: list[Any] = [None] * len(self.order)
        for number, tensor in zip(self.order, laid, strict=False):
            found[number] = tensor
        return found

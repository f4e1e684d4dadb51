"""Rows of several dtypes: what is frozen may have a dtype of its own.

A LoRA trains small adapters in float32 on a base that is frozen in bfloat16, or in integers of one
byte. What is trained has to have one dtype, because the gradients of a unit are one tensor. What is
frozen has no gradient, so in the same flat tensor it lies as bytes, after the rest (rows.py), and
is read through views of its dtype::

    weights       a [3, 2] float32, trained    b [4] bfloat16, frozen    c [3] uint8, frozen

    unsharded     aaaa aaaa aaaa aaaa aaaa aaaa .... ....  marks  bb bb bb bb  c c c .  padding
                  elements of float32                             bytes

So one collective gathers all of a unit, each parameter costs the bytes that it has, and what is
frozen costs no memory and no messages for a gradient. The flat tensor calls its elements float32.
But what lies as bytes is only ever copied: as numbers of that dtype it may be anything, even NaN.

With mixed precision each parameter of floating-point numbers is computed in ``param_dtype``, the
frozen ones too, and integers stay what they are. Then a frozen parameter may have more or fewer
bytes than in the shard, so the unsharded tensor is laid differently from the shard.

Source: ``torch.distributed.fsdp.fully_shard`` (pytorch 2.13), which gathers bytes where dtypes
differ, and asks for one dtype among trained parameters only. Views of all dtypes in one tensor are
our idea.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.blocks import of_rank
from minifsdp.rows import Rows, block_numel, local_shape

# What lies as bytes begins at a multiple of this many bytes, and the tensor ends at one. So it can
# be read as numbers of any dtype.
_ALIGNED = 16


def rows_of(
    shapes: Sequence[torch.Size],
    trained: Sequence[bool],
    world_size: int,
    dtypes: Mapping[str, torch.dtype],
    dims: Sequence[int] | None = None,
) -> Rows:
    """How a unit is divided in rows.

    Args:
        shapes, trained, world_size, dims: as of :class:`Rows`.
        dtypes: fully qualified name -> dtype, in the same order.

    Raises:
        ValueError: the trained parameters differ in dtype.
    """
    if len({*dtypes.values()}) < 2:
        return Rows(shapes, trained, world_size, dims)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for (name, dtype), is_trained in zip(dtypes.items(), trained, strict=True):
        if is_trained:
            by_dtype.setdefault(dtype, []).append(name)
    if len(by_dtype) > 1:
        found = "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in by_dtype.items())
        raise ValueError(
            f"the gradients of one unit are one tensor, so its trained parameters must have the "
            f"same dtype; those that are frozen may have any. Found {found}. Convert the trained "
            f"ones to one dtype, or wrap those of each dtype in a unit of their own."
        )
    return MixedRows(shapes, trained, world_size, list(dtypes.values()), dims)


class MixedRows(Rows):
    """Where the parameters of a unit are in its unsharded flat parameter, if they differ in dtype.

    Args:
        dtypes: of the parameters. The trained ones have the same one.

    Attributes:
        dtype: of the flat parameter: that of what is trained. If nothing is, that of one parameter,
            a floating-point one if possible. Then all other parameters lie as bytes.
        blocks: as of :class:`Rows`, but in bytes. What has a gradient is counted in elements.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        trained: Sequence[bool],
        world_size: int,
        dtypes: Sequence[torch.dtype],
        dims: Sequence[int] | None = None,
    ) -> None:
        first = list(trained)
        if not any(trained):
            floats = [dtype.is_floating_point for dtype in dtypes]
            first[floats.index(True) if True in floats else 0] = True
        super().__init__(shapes, first, world_size, dims)
        self.trained, self.dtypes = list(trained), dtypes
        self.dtype = dtypes[self.with_grad[0]]
        # The largest numbers first: then each begins at a multiple of its size.
        as_bytes = self.order[len(self.with_grad) :]
        self._as_bytes = sorted(as_bytes, key=lambda number: -dtypes[number].itemsize)
        blocks = [
            block_numel(shapes[n], world_size, self.dims[n]) * dtypes[n].itemsize
            for n in self._as_bytes
        ]
        before = [block * self.dtype.itemsize for block in self.trained_blocks]
        # The last padding is never empty: a whole shard is longer than what has a gradient.
        self._ends = [-sum(before) % _ALIGNED, *blocks, _ALIGNED - sum(blocks) % _ALIGNED]
        self.blocks = before + self._ends
        self.padded_numel = sum(self.blocks) * world_size // self.dtype.itemsize
        self._computed_in: dict[torch.dtype, MixedRows] = {}

    def computed_in(self, low: torch.dtype | None) -> "MixedRows":
        """How the parameters are laid while the unit is computed with.

        Args:
            low: what floating-point numbers are cast to; None: they are not cast.
        """
        if low is None:
            return self
        if low not in self._computed_in:
            dtypes = [low if dtype.is_floating_point else dtype for dtype in self.dtypes]
            cast = MixedRows(self.param_shapes, self.trained, self.world_size, dtypes, self.dims)
            self._computed_in[low] = cast
        return self._computed_in[low]

    def cast(self, shard: Tensor, layout: "MixedRows", rank: int) -> Tensor:
        """A copy of the shard of ``rank``, ``[padded_numel / world_size]``, laid as in ``layout``
        and cast to its dtypes; or ``shard`` itself, if it is laid so."""
        if layout is self:
            return shard
        cast = shard.new_zeros(layout.padded_numel // self.world_size, dtype=layout.dtype)
        for to, tensor in zip(
            layout.local_tensors(cast, rank), self.local_tensors(shard, rank), strict=True
        ):
            to.copy_(tensor)
        return cast

    def unflatten(self, flat: Tensor, frozen: Tensor | None = None) -> list[Any]:
        """See :class:`Rows`."""
        if flat.numel() == self.padded_numel:
            flat, frozen = flat[: self.trained_numel], flat[self.trained_numel :]
        views = super().unflatten(flat)
        if frozen is not None:
            sizes = [size * self.world_size for size in self._ends]
            self._read(frozen, sizes, self.param_shapes, views)
        return views

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """See :class:`Rows`."""
        own = of_rank(flat.view(torch.uint8), self.blocks, self.world_size, rank)
        return own.view(self.dtype)

    def local_tensors(self, shard: Tensor, rank: int) -> list[Any]:
        """See :class:`Rows`."""
        trained = sum(self.trained_blocks)
        tensors = super().local_tensors(shard[:trained], rank)
        if shard.numel() > trained:
            pairs = zip(self.param_shapes, self.dims, strict=True)
            shapes = [local_shape(shape, rank, self.world_size, dim) for shape, dim in pairs]
            self._read(shard[trained:], self._ends, shapes, tensors)
        return tensors

    def _read(
        self, end: Tensor, sizes: list[int], shapes: Sequence[torch.Size], into: list[Any]
    ) -> None:
        """Views of what lies as bytes.

        Args:
            end: what follows what has a gradient.
            sizes: in bytes, with the padding before and after.
            shapes: of all parameters.
            into: written, at their numbers.
        """
        pieces = torch.split(end.view(torch.uint8), sizes)[1:-1]
        for number, piece in zip(self._as_bytes, pieces, strict=True):
            shape, dtype = shapes[number], self.dtypes[number]
            numbers = piece[: shape.numel() * dtype.itemsize]
            if shape.numel():
                # In one step: else the view would refer to a view of other bytes, which is_in_use()
                # of the unsharded flat parameter would take for somebody else's.
                into[number] = numbers.view(*shape[:-1], -1).view(dtype)
            else:  # which torch refuses
                into[number] = numbers.view(dtype).view(shape).data

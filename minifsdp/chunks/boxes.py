"""What a chunk has of each parameter, as boxes that torch.distributed.checkpoint reads and writes.

A chunk is cut from its unit's flat tensor without regard to where parameters begin. Seen from a
parameter it is a range of elements, one row after another. Such a range is a few boxes::

    a weight [4, 5] of which this rank has elements 3 to 16

        . . . x x       box at (0, 3), 1 x 2
        x x x x x       box at (1, 0), 2 x 5
        x x x x x
        x x . . .       box at (3, 0), 1 x 2

torch.distributed.checkpoint saves boxes of tensors, and reads into any other boxes. It asks a
tensor which ones it has, by three methods, so it can save from the chunk where that lies, and load
into it: nothing is exchanged between ranks, and nothing is copied.

Source of the three methods: ``_Checkpointable`` in ``torch/distributed/checkpoint/planner.py``.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from minifsdp.featured_unit import FeaturedUnit

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins in each dimension, and how large it is there."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Divide elements ``start`` to ``stop`` of a tensor that lies in memory row after row.

    Yields:
        Boxes in the order of memory, at most ``2 * len(shape) - 1``. Together they have each
        element once.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:  # it begins and ends inside of one row
        yield from _inside(shape, last, start % row, stop % row)
        return
    if start % row:
        yield from _inside(shape, first - 1, start % row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop % row:
        yield from _inside(shape, last, 0, stop % row)


def _inside(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


class BoxedTensor(Tensor):
    """A tensor of which this rank has some boxes. It can be saved and loaded, and nothing else.

    Attributes:
        parts: the box that begins at each of these offsets.
    """

    parts: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor) -> "BoxedTensor":
        """One without boxes, as yet.

        Args:
            like: has the dtype and the device.
        """
        make = Tensor._make_wrapper_subclass
        made: BoxedTensor = make(cls, shape, dtype=like.dtype, device=like.device)
        made.parts = {}
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        has = {tuple(offset): list(part.shape) for offset, part in self.parts.items()}
        return f"BoxedTensor({list(self.shape)}, {self.dtype}, boxes {has})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.new_empty.default:  # async_save copies; then it sets `parts`
            like = torch.empty(0, dtype=args[0].dtype, device=(kwargs or {}).get("device"))
            return cls(torch.Size(args[1]), like)
        raise NotImplementedError(
            f"{func} was called with a tensor of minifsdp.state_to_save() or state_to_load(), "
            f"which has no values to compute with. They are for torch.distributed.checkpoint's "
            f"save and load; `with minifsdp.as_dtensors(model, optimizer)` shows DTensors."
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.parts[chunk.offsets]),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(at, part.shape) for at, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset]


def boxed(unit: FeaturedUnit, chunk: Tensor) -> list[BoxedTensor]:
    """The parameters of a unit, each with the boxes that this rank has of it.

    Args:
        chunk: ``[n]``, of any dtype: this rank's, as long as its ``unit.sharded_flat_param``.

    Returns:
        For each parameter of the unit a tensor of its shape, of views of ``chunk``.
    """
    begins = unit.layout.padded_numel // unit.shard_world_size * unit.shard_rank
    ends, found = begins + chunk.numel(), []
    sizes = [info.shape.numel() for info in unit.param_infos]
    starts = list(accumulate(sizes, initial=0))[:-1]
    for info, size, start in zip(unit.param_infos, sizes, starts, strict=True):
        tensor = BoxedTensor(info.shape, chunk)
        first, last = max(begins, start), min(ends, start + size)
        place = first - begins
        for offset, shape in boxes(info.shape, first - start, last - start):
            part = chunk[place : place + torch.Size(shape).numel()]
            tensor.parts[torch.Size(offset)] = part.view(shape)
            place += part.numel()
        if not size:  # torch wants a box for an empty tensor, too
            tensor.parts[torch.Size(0 for _ in info.shape)] = chunk.new_empty(info.shape)
        found.append(tensor)
    return found

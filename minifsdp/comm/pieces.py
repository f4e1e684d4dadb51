"""A gradient in pieces, which is sent from where autograd has left it.

Autograd computes a gradient for each parameter, and a unit is reduced as a whole. To concatenate
the gradients takes a pass over the memory, and as much memory again. On a CPU that is not needed:
a message can be sent from anywhere. Only small pieces are copied together, since each message has a
cost of its own::

    gradients of the parameters      w w w w w w w w    b b    c c    and two zeros
    what each of two ranks gets      w w w w w w w | w b b c c 0 0
    messages to them                 [w w w w w w w]   [w] [b b c c 0 0]

Both sides have to make the same cuts. A rank may have its gradient in one piece, for example if
``no_sync`` has left something that was added to it. So the cuts depend on the sizes of the
parameters alone, and a tensor in one piece is sent as if it were in these pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minifsdp.comm.blocks import Blocks, by_rank

SMALL = 1 << 16  # bytes; shorter messages are joined
_Slice = tuple[int, int, int]  # number of a piece; the first of its elements; the one after them


@dataclass(frozen=True)
class Pieces:
    """A tensor ``[n]`` that is not concatenated, with those methods of a tensor that a reduction
    needs. It is read and never written: its pieces may be in use elsewhere.

    Attributes:
        pieces: 1-D, contiguous, of one dtype and on one device; at least one.
    """

    pieces: Sequence[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def requires_grad(self) -> bool:
        for piece in self.pieces:  # noqa: SIM110  # any() would cost a call for each
            if piece.requires_grad:
                return True
        return False

    def numel(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def whole(self) -> Tensor:
        """The tensor, ``[n]``: a copy."""
        return torch.cat([*self.pieces])

    def to(self, dtype: torch.dtype) -> "Pieces":
        """As of a tensor: the same if it has this dtype."""
        return self if dtype is self.dtype else Pieces([piece.to(dtype) for piece in self.pieces])


def whole(tensor: Tensor | Pieces) -> Tensor:
    """The tensor itself; of pieces a copy."""
    return tensor if isinstance(tensor, Tensor) else tensor.whole()


def messages(
    tensor: Tensor | Pieces, sizes: Sequence[int] | None, blocks: Blocks | None, world_size: int
) -> list[list[Tensor]]:
    """What to send to each rank of a tensor that all ranks have.

    Args:
        tensor: ``[world_size * sum(blocks)]``.
        sizes: of its pieces, the same on all ranks. None: each block is one message.
        blocks: see blocks.py.
    """
    if sizes is None:
        return by_rank(whole(tensor), blocks, world_size)
    pieces = tensor.pieces if isinstance(tensor, Pieces) else torch.split(tensor, list(sizes))
    plan = _plan(tuple(sizes), blocks and tuple(blocks), world_size, SMALL // pieces[0].itemsize)
    return [[_message(pieces, slices) for slices in of_one_rank] for of_one_rank in plan]


def _message(pieces: Sequence[Tensor], slices: Sequence[_Slice]) -> Tensor:
    found = [pieces[number][start:stop] for number, start, stop in slices]
    return found[0] if len(found) == 1 else torch.cat(found)


@cache
def _plan(
    sizes: tuple[int, ...], blocks: tuple[int, ...] | None, world_size: int, small: int
) -> list[list[list[_Slice]]]:
    """For each rank its messages, and for each message the slices that it is made of."""
    plan: list[list[list[_Slice]]] = [[] for _ in range(world_size)]
    begin = 0
    for block in blocks or (sum(sizes) // world_size,):
        for of_one_rank in plan:
            for piece in _slices(sizes, begin, begin + block):
                if of_one_rank and _numel([piece]) < small and _numel(of_one_rank[-1]) < small:
                    of_one_rank[-1].append(piece)
                else:
                    of_one_rank.append([piece])
            begin += block
    return plan


def _slices(sizes: Sequence[int], start: int, stop: int) -> list[_Slice]:
    """The parts of pieces that are between two places of the whole tensor."""
    found, begin = [], 0
    for number, size in enumerate(sizes):
        first, last = max(start, begin), min(stop, begin + size)
        if first < last:
            found.append((number, first - begin, last - begin))
        begin += size
    return found


def _numel(slices: Sequence[_Slice]) -> int:
    return sum(stop - start for _, start, stop in slices)

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

import sys
from typing import Any

import torch
from torch import Tensor, nn


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


class FlatParameter(nn.Parameter):
    """The parameter the optimizer sees. A type of its own, so that outer units leave it alone."""

    is_chunk = False  # other ranks have the rest of it

    @property
    def grad(self) -> Tensor | None:
        """As of any parameter; but not for a function that would take it for the whole gradient.

        Raises:
            RuntimeError: asked by ``torch.nn.utils.clip_grad_norm_`` for one chunk of several.
        """
        if self.is_chunk:
            frame = sys._getframe(1)
            if frame.f_code.co_name == "<listcomp>" and frame.f_back is not None:
                frame = frame.f_back  # it has a frame of its own before Python 3.12
            if frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals.get("_get_total_norm"):
                raise RuntimeError(
                    "torch.nn.utils.clip_grad_norm_ was called on the parameters of a sharded "
                    "model. It would see this rank's chunks only, and scale by another norm on "
                    "each rank. Call the model's own method: model.clip_grad_norm_(max_norm)."
                )
        grad: Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


def flat_parameter(
    data: Tensor, requires_grad: bool, is_chunk: bool, grad_dtype: torch.dtype | None
) -> FlatParameter:
    """A flat parameter of ``data``, ``[n]``; its gradient has the same dtype, or ``grad_dtype``."""
    param = FlatParameter(data, requires_grad=requires_grad)
    param.is_chunk = is_chunk
    if grad_dtype is not None:
        param.grad_dtype = grad_dtype
    return param


_GRAD: Any = Tensor.grad  # the property that FlatParameter.grad stands before

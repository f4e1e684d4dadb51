"""An all-reduce in two halves, each of which is a stage of a reduction.

On a CPU an all-reduce is a reduce-scatter and then an all-gather of its result
(comm/collectives.py). The calling thread starts the second half, and has to wait for the first half
before that. So each half is a stage of its own: the second starts one unit later in the backward,
and both are hidden behind computation.
"""

from collections.abc import Iterator

from torch import Tensor

from minifsdp.comm.collectives import all_reduce
from minifsdp.core.streams import Finish
from minifsdp.featured_unit import FeaturedUnit

Started = tuple[Tensor, Iterator[Finish]]
"""The tensor that is reduced in place, and the halves that are to come."""


class FirstHalf:
    """After it each rank has a chunk of the mean over the ranks that have the same shard.

    Args:
        stream: the name of the stream that it runs on.
    """

    travels, on_host = True, False

    def __init__(self, stream: str) -> None:
        self.stream = stream

    def launch(self, unit: FeaturedUnit, value: Tensor) -> tuple[Started, Finish]:
        """``value``: shaped as ``unit.padded_shard``, on a CPU; written."""
        replicas = unit.replicate_group
        assert replicas is not None
        halves = all_reduce(value, replicas, 1 / replicas.size(), unit.tag, unit.label)
        finish = next(halves)
        return (value, halves), finish


class SecondHalf:
    """After it each of these ranks has all chunks."""

    stream, travels, on_host = "replicate", True, False

    def launch(self, unit: FeaturedUnit, value: Started) -> tuple[Tensor, Finish]:
        """Returns the tensor that the first half was given, and ``finish``."""
        flat, halves = value
        return flat, next(halves)

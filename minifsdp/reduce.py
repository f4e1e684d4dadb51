"""The third verb: turn a unit's gradient into this rank's share of the mean over ranks.

Every rank has seen other data, so every rank has another gradient for the whole unit. What is
needed is their mean, and of that only the part that belongs to this rank's shard::

    rank 0   [a0 b0]                      rank 0   mean(a0, a1)
    rank 1   [a1 b1]   reduce-scatter ->  rank 1   mean(b0, b1)

A rank that holds all parameters (NO_SHARD) needs all of the mean: an all-reduce.

A reduction holds three pieces of memory until it is over: the gradient that is being sent, what
arrives, and the result. The engine waits for one before it starts the next (see engine.py), so
there is never more than one such set besides the gradient being computed.
"""

from dataclasses import dataclass

from torch import Tensor

from minifsdp.collectives import all_reduce, reduce_scatter
from minifsdp.streams import Event, Finish, Streams
from minifsdp.unit import Unit


@dataclass
class Reduction:
    """A gradient on its way. ``result``: ``[n]`` as ``unit.chunk``, valid after ``event``."""

    unit: Unit
    result: Tensor
    event: Event
    sent: Tensor | None  # kept: until the event, the reduce stream reads it


def reduce_gradient(unit: Unit, grad: Tensor, streams: Streams) -> Reduction:
    """Start reducing ``grad``, the gradient of ``unit.full`` (same shape), on the reduce stream."""
    # Without this wait the reduction would send what the backward has yet to write.
    streams.reduce.wait_event(streams.compute.record_event())
    result, shards, replicas = grad, unit.shard_group, unit.replicate_group
    assert (shards is None) != (replicas is None), "both at once would be hybrid sharding"

    def launch() -> Finish:
        nonlocal result
        if replicas is not None:
            return all_reduce(grad, replicas, 1 / replicas.size())
        assert shards is not None
        result, finish = reduce_scatter(grad, shards, 1 / shards.size(), unit.tag)
        return finish

    event = streams.reduce.submit(launch)
    return Reduction(unit, result, event, grad)


def store_gradient(reduction: Reduction) -> None:
    """Put a finished reduction where the optimizer looks: add it to ``shard.grad``.

    Called for all units at the end of a backward, so that a backward that failed leaves nothing.
    """
    shard = reduction.unit.shard
    grad = reduction.result[: shard.numel()]
    if shard.grad is None:
        shard.grad = grad
    else:
        shard.grad.add_(grad)

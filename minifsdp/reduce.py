"""The third verb: turn a unit's gradient into this rank's share of the mean over ranks.

Every rank has seen other data, so every rank has another gradient for the whole unit. What is
needed is their mean, and of that only the part that belongs to this rank's shard::

    rank 0   [a0 b0]                      rank 0   mean(a0, a1)
    rank 1   [a1 b1]   reduce-scatter ->  rank 1   mean(b0, b1)

Where the parameters are replicated, over all ranks (NO_SHARD) or over groups of them, the replicas
then all-reduce what they hold.

A reduction holds three pieces of memory until it is over: the gradient that is being sent, what
arrives, and the result. The engine waits for one before it starts the next (see hooks.py), so there
is never more than one such set besides the gradient being computed.
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
    ranks = unit.ranks * (unit.replicate_group.size() if unit.replicate_group is not None else 1)
    result = grad

    def launch() -> Finish:
        nonlocal result
        if unit.shard_group is None:
            assert unit.replicate_group is not None
            return all_reduce(grad, unit.replicate_group, 1 / ranks)
        result, finish = reduce_scatter(grad, unit.shard_group, 1 / ranks, unit.tag)
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

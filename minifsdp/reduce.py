"""The third verb: turn a unit's gradient into this rank's share of the mean over ranks.

Every rank has seen other data, so every rank has another gradient for the whole unit. What is
needed is their mean, and of that only the part that belongs to this rank's shard::

    rank 0   [a0 b0]                      rank 0   mean(a0, a1)
    rank 1   [a1 b1]   reduce-scatter ->  rank 1   mean(b0, b1)

A rank that holds all parameters (NO_SHARD) needs all of the mean: an all-reduce. With hybrid
sharding there are both, one after the other: a reduce-scatter in the group that shares the
parameters, then an all-reduce, of a chunk only, over those that have the same chunk.

On a CPU an all-reduce comes in two halves (see collectives.py). Each is started when the one before
has arrived, one or two units later in the backward, so that the computation hides both.

A reduction holds three pieces of memory until it is over: the gradient that is being sent, what
arrives, and the result. The engine lets one arrive before it starts the next (see engine.py), so
there is never more than one such set besides the gradient being computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from minifsdp.comm.collectives import all_reduce, halves, reduce_scatter
from minifsdp.offload import download
from minifsdp.streams import Event, Finish, Streams
from minifsdp.unit import Unit


@dataclass
class Reduction:
    """A gradient on its way. ``result`` is shaped as ``unit.padded_shard``, valid after ``event``."""

    unit: Unit
    result: Tensor
    event: Event
    sent: tuple[Tensor, ...] = ()  # kept: until it has arrived, the reduce stream reads it
    to_come: int = 0  # halves of its all-reduce that are not submitted yet
    all_reduce: Iterator[Finish] | None = None


def reduce_gradient(unit: Unit, grad: Tensor, streams: Streams) -> Reduction:
    """Start reducing ``grad``, the gradient of ``unit.unsharded.flat_param`` (same shape), on the reduce stream."""
    # Without this wait the reduction would send what the backward has yet to write.
    written = streams.compute.record_event()
    streams.reduce.wait_event(written)
    shards = unit.shard_group
    reduction = Reduction(unit, grad, written)
    if unit.replicate_group is not None:
        reduction.to_come = halves(grad) - (shards is None)

    def launch() -> Finish:
        dtype = unit.precision.reduce_dtype
        low = grad if dtype is None else grad.to(dtype)
        reduction.result, reduction.sent = low, (grad, low)
        if shards is None:
            return _next_half(reduction, low)
        reduction.result, finish = reduce_scatter(
            low, shards, 1 / shards.size(), unit.tag, unit.label
        )
        return finish

    reduction.event = streams.reduce.submit(launch, f"reduce {unit.label}")
    return reduction


def let_arrive(reduction: Reduction, streams: Streams) -> None:
    """Wait for the first part of a reduction, and start the rest: over replicas, to the host."""
    reduction.event.wait()
    reduction.sent = ()
    go_on(reduction, streams)
    unit = reduction.unit
    if unit.offload_from is not None:
        go_on(reduction, streams)
        ready = reduction.event
        reduction.result, reduction.event = download(reduction.result, ready, streams, unit.label)


def go_on(reduction: Reduction, streams: Streams) -> None:
    """Start the next half of the all-reduce over replicas, if one is left, after the last."""
    if reduction.to_come:
        reduction.to_come -= 1
        result = reduction.result  # as it is now, not when this starts: a download replaces it
        streams.replicate.wait_event(reduction.event)
        reduction.event = streams.replicate.submit(
            lambda: _next_half(reduction, result), f"all-reduce {reduction.unit.label}"
        )


def _next_half(reduction: Reduction, flat: Tensor) -> Finish:
    unit, replicas = reduction.unit, reduction.unit.replicate_group
    assert replicas is not None
    if reduction.all_reduce is None:
        scale = 1 / replicas.size()
        reduction.all_reduce = all_reduce(flat, replicas, scale, unit.tag, unit.label)
    return next(reduction.all_reduce)


def wait_for(reduction: Reduction) -> None:
    """Wait for the end of a reduction, in the place where it will be added to others."""
    if reduction.unit.offload_from is not None:
        reduction.event.synchronize()  # it is the host that will read it
    else:
        reduction.event.wait()


def store_gradient(reduction: Reduction) -> None:
    """Put a finished reduction where the optimizer looks: add it to ``shard.grad``.

    Called for all units at the end of a backward, so that a backward that failed leaves nothing.
    """
    unit, shard = reduction.unit, reduction.unit.sharded_flat_param
    # Its own dtype or, with keep_low_precision_grads, a lower one; whatever was computed with.
    grad, before = reduction.result[: shard.numel()].to(shard.grad_dtype), shard.grad
    unit.unreduced_grad = None  # it was part of the sum
    if before is None:
        shard.grad = grad
    else:
        before.add_(grad)

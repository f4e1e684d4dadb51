"""Reduce: from each rank's gradient of a unit to this rank's shard of their mean.

Every rank has computed with other data, so each has a different gradient of the unsharded flat
parameter. The optimizer of a rank needs their mean, and of that only its own shard::

    rank 0   [a0 b0]                      rank 0   mean(a0, a1)
    rank 1   [a1 b1]   reduce-scatter ->  rank 1   mean(b0, b1)

A rank that has all parameters (NO_SHARD) needs all of the mean, so the gradient is all-reduced.
Hybrid sharding does both: a reduce-scatter in the group that shares the parameters, and then an
all-reduce of a shard over the ranks that have the same shard.

On a CPU an all-reduce has two parts, a reduce-scatter and an all-gather (comm/collectives.py). So a
reduction has up to three parts, one after the other. Each part is started when the one before is
complete, one or two units later in the backward, so that the computation hides all of them.

Until its first part is complete a reduction needs memory for the gradient that is sent, and for
what other ranks send, where the result will be. On a CPU the gradient is sent from where autograd
has left it; for NCCL it is copied together. The engine waits for the first part of one reduction
before it starts the next (gradients.py). So there is at most one such set of memory, and the
gradient that is being computed.

Source: Rajbhandari et al., "ZeRO", arXiv:1910.02054.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from minifsdp.comm.collectives import all_reduce, halves, reduce_scatter
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.offload import download
from minifsdp.rows import Rows
from minifsdp.streams import Event, Finish, Streams
from minifsdp.unit import Unit


@dataclass
class Reduction:
    """The reduction of one gradient, in progress.

    Attributes:
        unit: whose gradient it is.
        result: shaped as ``unit.padded_shard``; in the dtype of the reduction; on the unit's device
            and, with offload, at last on the host.
        event: when it is passed, all parts that were started are complete. After the last part
            ``result`` has its values.
        sent: the tensors that the first part reads; empty when it is complete.
        parts_left: parts of the all-reduce that are not started yet.
        all_reduce: starts these parts, one after the other; None before the first.
    """

    unit: Unit
    result: Tensor
    event: Event
    sent: tuple[Tensor | Pieces, ...] = ()
    parts_left: int = 0
    all_reduce: Iterator[Finish] | None = None


def reduce_gradient(unit: Unit, grad: Tensor | Pieces, streams: Streams) -> Reduction:
    """Start the first part of a reduction, on the reduce stream.

    Args:
        grad: the gradient of ``unit.unsharded.flat_param``, ``[padded_numel]``, in its dtype or,
            with what no_sync has left, in a wider one. A tensor may be overwritten. Pieces come
            only for a unit that is shared by the ranks of a shard group, on CPUs.
    """
    # Without this wait the reduction would send what the backward has yet to write.
    written = streams.compute.record_event()
    streams.reduce.wait_event(written)
    shards = unit.shard_group
    reduction = Reduction(unit, unit.padded_shard, written)  # till launch() has begun
    if unit.replicate_group is not None and unit.comm_hook is None:
        # Without a shard group the all-reduce is all there is, so launch() starts one of its parts.
        reduction.parts_left = halves(unit.device) - (shards is None)

    def launch() -> Finish:
        dtype = unit.precision.reduce_dtype
        cast = grad if dtype is None else grad.to(dtype)
        # Referred to until this part is complete: otherwise the memory could be given to another
        # tensor while the reduce stream still reads it.
        reduction.sent = grad, cast
        if unit.comm_hook is not None:  # a user's own reduction, which waits for its end
            reduction.result = unit.comm_hook(whole(cast))
            return lambda: None
        if shards is None:
            reduction.result = whole(cast)
            return _start_all_reduce_part(reduction, reduction.result)
        reduction.result, finish = reduce_scatter(
            cast, shards, 1 / shards.size(), unit.tag, unit.label,
            blocks=unit.layout.trained_blocks, sizes=unit.layout.sizes,
        )  # fmt: skip
        return finish

    reduction.event = streams.reduce.submit(launch, f"reduce {unit.label}")
    return reduction


def wait_for_first_part(reduction: Reduction, streams: Streams) -> None:
    """Make the compute stream wait for the first part. Then start what comes after it: the next
    part of the all-reduce over replicas or, with offload, all parts and the copy to the host."""
    reduction.event.wait()
    reduction.sent = ()
    start_next_part(reduction, streams)
    unit = reduction.unit
    if unit.offload_from is not None:
        start_next_part(reduction, streams)
        ready = reduction.event
        reduction.result, reduction.event = download(reduction.result, ready, streams, unit.label)


def start_next_part(reduction: Reduction, streams: Streams) -> None:
    """Start the next part of the all-reduce over replicas, if there is one, after the last part."""
    if reduction.parts_left:
        reduction.parts_left -= 1
        result = reduction.result  # the tensor on the device: download() replaces it by a host copy
        # Without this wait the all-reduce would send what the part before has yet to write.
        streams.replicate.wait_event(reduction.event)
        reduction.event = streams.replicate.submit(
            lambda: _start_all_reduce_part(reduction, result), f"all-reduce {reduction.unit.label}"
        )


def _start_all_reduce_part(reduction: Reduction, flat: Tensor) -> Finish:
    unit, replicas = reduction.unit, reduction.unit.replicate_group
    assert replicas is not None
    if reduction.all_reduce is None:
        scale = 1 / replicas.size()
        reduction.all_reduce = all_reduce(flat, replicas, scale, unit.tag, unit.label)
    return next(reduction.all_reduce)


def wait_for_reduction(reduction: Reduction) -> None:
    """Wait for the last part: the host waits if the gradient is added to others on the host, and
    otherwise the compute stream."""
    if reduction.unit.offload_from is not None:
        # Without this wait the host would read a gradient that has not arrived.
        reduction.event.synchronize()
    else:
        reduction.event.wait()


def store_gradient(reduction: Reduction) -> None:
    """Add the result of a reduction to the gradient of the sharded flat parameter.

    The engine calls this for all units at the end of a backward, so that a backward that failed
    changes no gradient. In rows a parameter that no rank has used gets none.
    """
    unit, shard = reduction.unit, reduction.unit.sharded_flat_param
    unused = _without_gradient(reduction) if unit.has_unused else []
    # ``grad_dtype`` is that of the shard or, with keep_low_precision_grads, ``param_dtype``.
    grad, before = reduction.result[: shard.numel()].to(shard.grad_dtype), shard.grad
    unit.unreduced_grad = None  # what no_sync has left was part of this sum
    # Assigned in both cases: in rows this shows it in each DTensor, also where one was cleared.
    shard.grad = grad if before is None else before.add_(grad)
    for number in unused:
        unit.optimized_params[number].grad = None


def _without_gradient(reduction: Reduction) -> list[int]:
    """The parameters of a unit in rows that had no gradient before this one, which no rank has used
    for it. Zeros would let an optimizer change them, by weight decay or by momentum."""
    unit = reduction.unit
    if not isinstance(unit.layout, Rows) or unit.comm_hook is not None:  # which may do anything
        return []
    params, waiting = unit.optimized_params, unit.unreduced_grad
    cleared: Sequence[int] = () if waiting is None else waiting.cleared
    unused = unit.layout.unused(reduction.result)
    return [n for n in unused if params[n].grad is None or n in cleared]

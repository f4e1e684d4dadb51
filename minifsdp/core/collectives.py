"""The collectives: how tensors travel between ranks.

Two of them carry all of FSDP::

    all-gather        rank 0: A . .      A B C        each rank has a chunk before,
                      rank 1: . B .  ->  A B C        and all chunks after it
                      rank 2: . . C      A B C

    reduce-scatter    rank 0: a b c      sum(a) .  .  each rank has a full tensor before,
                      rank 1: a b c  ->  . sum(b)  .  and the sum over all ranks of one
                      rank 2: a b c      .  . sum(c)  chunk after it

An all-reduce is a reduce-scatter followed by an all-gather of its result.

How a unit does them is a strategy of the unit, its ``comm``. Here are torch's own functions. Each
method *starts* a collective and returns ``finish``, which waits for it (see streams.py). So the
rank can compute in between.

Source: that FSDP needs the two halves of an all-reduce at different times is from Rajbhandari et
al., "ZeRO", arXiv:1910.02054.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .streams import Finish

Group = dist.ProcessGroup
# torch 2.13 renamed these two, and warns about the old names.
torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchCollectives:
    """torch's own. ``unit`` is divided in chunks (shard.py): a shard is in one piece. All tensors
    are 1-D and on the unit's device. A rank that does not come makes ``finish`` raise a
    RuntimeError. Another ``comm`` has the same methods, and may wrap this one.

    On a CPU the threads of the network library send, and ``finish`` waits for them. On a GPU a
    collective that is not asynchronous runs on the stream that it is called on, which is one of
    ours, with its priority. (As ``async_op`` it would run on a stream of NCCL's, and two streams
    would have to wait for each other.)
    """

    def all_gather(self, unit: Any, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """Fill ``full`` with what the ranks of ``group`` have.

        Args:
            unit: a :class:`unit.Unit`, whose parameters they are.
            full: ``[padded_numel]``, written. In the unit's own group each shard comes where the
                unit's layout has it; in another group the shards come end to end, in rank order.
            shard: ``[padded_numel / group.size()]``, this rank's, of the same dtype.
            group: the ranks that take part.
        """
        return _finish(torch_all_gather(full, shard, group=group, async_op=_by_threads(full)))

    def reduce_scatter(self, unit: Any, flat: Tensor, scale: float) -> tuple[Tensor, Finish]:
        """Add up ``scale * flat`` over the ranks that share the unit, and keep this rank's shard of
        the sum. Each rank's tensor is scaled before it is added, as by DistributedDataParallel:
        sums of gradients in half precision would overflow where their mean does not.

        Args:
            unit: whose gradient it is.
            flat: as the unit's views give it (views.py), ``[trained_numel]``, floating point. A
                tensor may be overwritten. It must stay alive until ``finish`` has run.
            scale: ``1 / world_size`` for a mean.

        Returns:
            The sum, ``[trained_numel / world_size]``, of the dtype of ``flat``, in memory of its
            own, valid once ``finish`` has run; and ``finish``.
        """
        group = unit.shard_group
        total = flat.new_empty(flat.numel() // group.size())
        sent, by_threads = flat.mul_(scale), _by_threads(flat)
        return total, _finish(torch_reduce_scatter(total, sent, group=group, async_op=by_threads))

    def all_reduce(self, unit: Any, flat: Tensor, scale: float, group: Group) -> Finish:
        """Replace ``flat``, ``[n]``, by the sum of ``scale * flat`` over the ranks of ``group``."""
        return _finish(dist.all_reduce(flat.mul_(scale), group=group, async_op=_by_threads(flat)))


def _by_threads(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _finish(work: Any) -> Finish:
    """``work``: None if the collective is on the stream that it was called on."""
    return work.wait if work is not None else lambda: None

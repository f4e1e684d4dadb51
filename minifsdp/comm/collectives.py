"""The collectives on CPUs: an all-gather, a reduce-scatter and an all-reduce, of direct messages.

::

    all-gather        rank 0: A . .      A B C        each rank sends its chunk to all others
                      rank 1: . B .  ->  A B C
                      rank 2: . . C      A B C

    reduce-scatter    rank 0: a b c      sum(a) .  .  each rank sends to each other rank the
                      rank 1: a b c  ->  . sum(b)  .  chunk that the other rank adds up
                      rank 2: a b c      .  . sum(c)

    all-reduce        a reduce-scatter, and then an all-gather of its result

Each function *starts* its collective and returns ``finish``, which waits for it (see streams.py),
so the rank can compute in between. An all-reduce has one ``finish`` for each of its two halves.

Data goes from rank to rank directly, out of and into views of the flat tensors: from memory to
memory on one machine, by gloo between machines (transport.py). gloo's own collectives waste half of
what they move: its reduce-scatter is a copy, a full all-reduce (twice the bytes) and a slice, and
its all-gather goes through a temporary of full size. Each rank adds up what it receives in the
order in which gloo does it, so sums equal torch's bit for bit. Direct messages also have tags
(message_tags.py). Without tags, where two ranks reduce different units, gloo's all-reduce would add
up what does not belong together, or end the process. For comparison, ``MINIFSDP_COLLECTIVES=gloo``
sends by gloo on one machine, too, and ``MINIFSDP_COLLECTIVES=native`` selects torch's own
collectives, as on a GPU: NCCL does all of this well.

Source: the ring all-reduce of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009, is the order of gloo's additions.
"""

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.comm.blocks import Blocks, by_rank, copy_apart
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.pieces import Pieces, messages
from minifsdp.comm.transport import Work, send_recv, wait_for
from minifsdp.core.collectives import Group, torch_all_gather
from minifsdp.core.streams import Finish

_CHOICE = os.environ.get("MINIFSDP_COLLECTIVES", "")
if _CHOICE not in ("", "gloo", "native"):
    raise ValueError(f"MINIFSDP_COLLECTIVES is 'gloo', 'native' or unset, not {_CHOICE!r}")
NATIVE = _CHOICE == "native"


def all_gather(
    full: Tensor,
    chunk: Tensor,
    group: Group,
    tag: int,
    label: str = "",
    kind: Kind = Kind.PARAMETERS,
    blocks: Blocks | None = None,
) -> Finish:
    """Fill ``full`` with the chunks of all ranks, in rank order.

    Args:
        full: ``[n]``, on a CPU, written. Where ranks cannot have equal parts of it, the first ones
            have one element more, as with ``tensor_split``.
        chunk: this rank's part; same dtype and device as ``full``. Other ranks may read it even
            after ``finish``, if ``kind`` is PARAMETERS, until transport.wait_for_readers().
        group: the ranks that take part.
        tag: the unit's number, the same on all ranks. Several collectives may be under way at the
            same time; message_tags.py makes a tag for each of them.
        label: the unit's, for errors.
        kind: what is gathered.
        blocks: sizes of the pieces of ``chunk``, if these do not stay together in ``full``; None if
            they do. See blocks.py; ``Columns`` are not allowed. (In the exercises it is None.)

    Raises:
        RuntimeError: (``finish`` does) another rank does not take part, has ended, or is in another
            collective; see deadlock_watch.py.
    """
    message = Message(group, tag, kind, full.itemsize, label)
    parts, own = by_rank(full, blocks, group.size()), by_rank(chunk, blocks, 1)[0]
    works: list[Work] = []
    for to, source in _turns(group):
        works += send_recv(own, to, partial(parts.__getitem__, source), source, message)
    for part, block in zip(parts[group.rank()], own, strict=True):
        part.copy_(block)  # while the other ranks' travel
    return wait_for(works, message)


def reduce_scatter(
    flat: Tensor | Pieces,
    group: Group,
    scale: float,
    tag: int,
    label: str = "",
    kind: Kind = Kind.REDUCTION,
    blocks: Blocks | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Finish]:
    """Add up ``scale * flat`` over all ranks and keep this rank's chunk of the sum.

    Each rank's tensor is scaled before it is added, as DistributedDataParallel does. Otherwise sums
    of gradients in half precision would overflow where their mean does not.

    Args:
        flat: ``[n]``, floating point, on a CPU, divided among ranks as in :func:`all_gather`. It
            must stay alive until ``finish`` has run.
        group: the ranks that take part.
        scale: ``1 / world_size`` for a mean.
        tag, label, kind, blocks: as in :func:`all_gather`.
        sizes: the sizes of the pieces in which some of the ranks have ``flat``; see pieces.py.

    Returns:
        This rank's chunk of the sum, of the dtype of ``flat``, valid once ``finish`` has run; and
        ``finish``.
    """
    message = Message(group, tag, kind, flat.dtype.itemsize, label)
    parts = messages(flat, sizes, blocks, group.size())
    own = parts[group.rank()]
    lengths = [len(part) for part in own]  # of the messages that come from each other rank
    received, works = list[Tensor](), list[Work]()
    for to, source in _turns(group):
        # It gets its memory when data arrives. Until then the next unit's parameters can use that.
        received.append(_without_memory(sum(lengths), flat.dtype))
        places = partial(_in_parts, received[-1], lengths)
        works += send_recv(parts[to], to, places, source, message)
    # In gloo's ring the chunk of rank r is the sum of those of rank r-1, then r-2, ..., and its own
    # last. Addition of floats is not associative: in any other order the result would differ from
    # torch's in the last bit.
    total = received[0] if received else torch.cat(own)
    arrive = wait_for(works, message)
    # torch scales each addend, rounds it, and adds it. To scale and add in one operation is faster,
    # but skips the rounding. Both give the same bits if scaling rounds nothing: a scale that is a
    # power of two changes only the exponent (which in fp16 may be too small for it).
    exact = math.frexp(scale)[0] == 0.5 and total.dtype is not torch.float16

    def finish() -> None:
        arrive()
        total.mul_(scale)
        addends = [*(torch.split(part, lengths) for part in received[1:]), own][: len(received)]
        for addend in addends:
            for place, part in zip(torch.split(total, lengths), addend, strict=True):
                if exact:
                    place.add_(part, alpha=scale)
                else:
                    place.add_(part * scale)

    return total, finish


def all_reduce(
    flat: Tensor, group: Group, scale: float, tag: int = 0, label: str = ""
) -> Iterator[Finish]:
    """Add up ``scale * flat`` over all ranks, in place, on every rank.

    Args:
        flat: ``[n]`` with any n, on a CPU, written; must stay alive until the end.
        scale, tag, label: as in :func:`reduce_scatter`.

    Yields:
        The ``finish`` of each of its two halves. A half starts when the generator is asked for it,
        and the second one needs the result of the first, so ask for it after the first ``finish``
        has run.
    """
    kind = Kind.ALL_REDUCTION
    total, finish = reduce_scatter(flat, group, scale, tag, label, kind)
    yield finish
    yield all_gather(flat, total, group, tag, label, kind)


def gather(
    full: Tensor,
    chunk: Tensor,
    group: Group,
    tag: int,
    label: str,
    kind: Kind,
    blocks: Blocks | None = None,
) -> None:
    """An all-gather of something other than a unit's parameters, on any device. Waits for it.

    Args:
        full, chunk, group, tag, label, kind, blocks: as in :func:`all_gather`.
    """
    if direct(full.device):
        all_gather(full, chunk, group, tag, label, kind, blocks)()
        return
    apart = blocks if blocks is not None and len(blocks) > 1 else None
    gathered = full if apart is None else torch.empty_like(full)
    of_torch = Message(group, tag, kind, full.itemsize, label)
    wait_for([torch_all_gather(gathered, chunk, group=group, async_op=True)], of_torch)()
    if apart is not None:
        copy_apart(gathered, full, apart, group.size())


def add_up(number: Tensor, group: Group, largest: bool = False) -> None:
    """Replace ``number`` by its sum over all ranks, or by the largest. Waits for the result."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work = dist.all_reduce(number, op, group=group, async_op=True)
    wait_for([work], _other(group, "the sum of a number over all ranks"))()


def broadcast(tensor: Tensor, group: Group) -> None:
    """Replace ``tensor`` by that of the group's first rank. Waits for it."""
    # gloo and NCCL send memory as it lies, and strides may differ from rank to rank. Without this a
    # transposed tensor would arrive with its elements in the wrong order.
    sent = tensor.contiguous()
    work = dist.broadcast(sent, group=group, group_src=0, async_op=True)
    wait_for([work], _other(group, "the broadcast of rank 0's values"))()
    if sent is not tensor:
        tensor.copy_(sent)


def _turns(group: Group) -> Iterator[tuple[int, int]]:
    """For each turn the rank to send to and the rank to receive from. In each turn every rank sends
    once and receives once. The sources come in the order rank - 1, rank - 2, ..."""
    rank, world_size = group.rank(), group.size()
    for distance in range(1, world_size):
        yield (rank + distance) % world_size, (rank - distance) % world_size


def direct(device: torch.device) -> bool:
    """Whether ranks with tensors on this device send each other direct messages. If not, they use
    torch's own collectives."""
    return device.type == "cpu" and not NATIVE


def _without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    made = torch.empty(numel, dtype=dtype, device="cpu")
    made.untyped_storage().resize_(0)
    return made


def _in_parts(tensor: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """Give ``tensor`` its memory, and divide it."""
    tensor.untyped_storage().resize_(tensor.nbytes)
    return torch.split(tensor, lengths)


def _other(group: Group, label: str) -> Message:
    return Message(group, 0, Kind.OTHER, 1, label)

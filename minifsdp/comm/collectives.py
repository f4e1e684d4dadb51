"""What ranks say to each other. The only file that calls ``torch.distributed`` collectives.

Two conversations carry all of FSDP::

    all-gather        rank 0: A . .      A B C        every rank has a chunk,
                      rank 1: . B .  ->  A B C        afterwards every rank has them all
                      rank 2: . . C      A B C

    reduce-scatter    rank 0: a b c      sum(a) .  .  every rank has a full tensor,
                      rank 1: a b c  ->  . sum(b)  .  afterwards each has the sum of
                      rank 2: a b c      .  . sum(c)  its own chunk over all ranks

and an all-reduce is the second followed by the first.

Each function *starts* its collective and returns ``finish``, which waits for it (see streams.py).
An all-reduce has one ``finish`` for each of its halves.

**On CPU** gloo's own versions waste half of what they move: its reduce-scatter is a copy, a full
all-reduce (twice the bytes) and a slice, its all-gather goes through a temporary of full size. So
ranks exchange point to point, straight out of and into views of the flat buffers, and each adds up
what it receives, in gloo's own order, so that sums are equal to torch's bit for bit. Messages from
rank to rank have tags, too, and gloo's collectives have none: where two ranks reduce other units,
gloo's all-reduce adds up what does not belong together, or ends the process.
``MINIFSDP_COLLECTIVES=native`` selects torch's versions instead, for comparison.

**On CUDA** NCCL does all this well; its collectives are called as they are.
"""

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.comm import deadlock_watch
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.streams import Finish

_CHOICE = os.environ.get("MINIFSDP_COLLECTIVES", "")
if _CHOICE not in ("", "native"):
    raise ValueError(f"MINIFSDP_COLLECTIVES is 'native' or unset, not {_CHOICE!r}")
NATIVE = _CHOICE == "native"

Group = dist.ProcessGroup
# torch 2.13 renamed these two, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    full: Tensor,
    chunk: Tensor,
    group: Group,
    tag: int,
    label: str = "",
    kind: Kind = Kind.PARAMETERS,
) -> Finish:
    """Fill ``full`` with the chunks of all ranks, in rank order.

    Args:
        full: ``[world_size * n]``, written.
        chunk: ``[n]``, this rank's part; same dtype and device as ``full``.
        group: the ranks that take part.
        tag: the unit's number, the same on all ranks. Conversations of different units, and the
            different ones of one unit, may overlap; message_tags.py makes tags of their own for
            them.
        label: the unit's, for errors.
        kind: what is gathered.
    """
    message = Message(group, tag, kind, full.itemsize, label)
    if _native(full):
        return _wait_for([_all_gather(full, chunk, group=group, async_op=True)], message)
    parts, rank, tag = full.tensor_split(group.size()), group.rank(), message.tag
    works = []
    for to, source in _turns(group):
        works += _exchange(chunk, to, parts[source], source, group, tag)
    parts[rank].copy_(chunk)  # while the others are under way
    return _wait_for(works, message)


def reduce_scatter(
    flat: Tensor,
    group: Group,
    scale: float,
    tag: int,
    label: str = "",
    kind: Kind = Kind.REDUCTION,
) -> tuple[Tensor, Finish]:
    """Add up ``scale * flat`` over all ranks and keep this rank's chunk of the sum.

    Each contribution is scaled before it is added, as DistributedDataParallel does: sums of
    gradients in half precision would overflow where their mean does not.

    Args:
        flat: ``[world_size * n]``; may be overwritten; must stay alive until the end.
        group: the ranks that take part.
        scale: ``1 / world_size`` for a mean.
        tag, label, kind: as in :func:`all_gather`.

    Returns:
        The sum, ``[n]``, valid once ``finish`` has run; and ``finish``.
    """
    chunks = flat.tensor_split(group.size())
    own = chunks[group.rank()]
    message = Message(group, tag, kind, flat.itemsize, label)
    if _native(flat):
        total = flat.new_empty(own.shape)
        flat.mul_(scale)
        work = _reduce_scatter(total, flat, group=group, async_op=True)
        return total, _wait_for([work], message)
    received, works, tag = [], [], message.tag
    for to, source in _turns(group):
        received.append(flat.new_empty(own.shape))
        works += _exchange(chunks[to], to, received[-1], source, group, tag)
    # gloo's ring adds rank r-1, then r-2, ..., own last. Addition of floats is not associative:
    # in any other order the result would differ from torch's in the last bit.
    addends = [*received, own]
    total = addends[0] if received else own.clone()

    arrive = _wait_for(works, message)
    # torch rounds each addend after scaling. In one operation with the sum that is not rounded; it
    # is faster, and the same where a power of two moves the exponent only (but fp16's ends soon).
    exact = math.frexp(scale)[0] == 0.5 and flat.dtype is not torch.float16

    def finish() -> None:
        arrive()
        total.mul_(scale)
        for addend in addends[1:]:
            if exact:
                total.add_(addend, alpha=scale)
            else:
                total.add_(addend.mul_(scale))

    return total, finish


def all_reduce(
    flat: Tensor, group: Group, scale: float, tag: int = 0, label: str = ""
) -> Iterator[Finish]:
    """Add up ``scale * flat`` over all ranks, in place, on every rank.

    Args:
        flat: ``[n]``, any number of elements; must stay alive until the end.

    Yields:
        The ``finish`` of each of :func:`halves`, one after the other. Each is started when it is
        asked for, which has to be after the one before has run. What is computed meanwhile hides
        both.
    """
    kind = Kind.ALL_REDUCTION
    if _native(flat):
        flat.mul_(scale)
        message = Message(group, tag, kind, flat.itemsize, label)
        yield _wait_for([dist.all_reduce(flat, group=group, async_op=True)], message)
        return
    total, finish = reduce_scatter(flat, group, scale, tag, label, kind)
    yield finish
    yield all_gather(flat, total, group, tag, label, kind)


def halves(flat: Tensor) -> int:
    """In how many parts an all-reduce of ``flat`` comes: torch's own does it in one."""
    return 1 if _native(flat) else 2


def add_up(number: Tensor, group: Group, largest: bool = False) -> None:
    """The sum of ``number`` over all ranks, or the largest, in place, now."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work = dist.all_reduce(number, op, group=group, async_op=True)
    _wait_for([work], _other(group, "the sum of a number over all ranks"))()


def broadcast(tensor: Tensor, group: Group) -> None:
    """Give every rank what the group's first rank has, in place, now."""
    # Whose data it is must not depend on its layout: gloo and NCCL send memory as it lies.
    sent = tensor.contiguous()
    work = dist.broadcast(sent, group=group, group_src=0, async_op=True)
    _wait_for([work], _other(group, "the broadcast of rank 0's values"))()
    if sent is not tensor:
        tensor.copy_(sent)


def gather_objects(mine: object, group: Group, label: str = "an exchange of notes") -> list[Any]:
    """What each rank of the group says, by rank. Slow: for what is said once.

    (``dist.all_gather_object`` needs NumPy, which torch does not bring along.)
    """
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    text = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    lengths = [torch.empty(1, dtype=torch.long, device=device) for _ in range(group.size())]
    about = _other(group, label)
    work = dist.all_gather(
        lengths, torch.tensor([len(text)], device=device), group=group, async_op=True
    )
    _wait_for([work], about)()
    padded = text.new_zeros(max(int(length) for length in lengths))
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    _wait_for([dist.all_gather(texts, padded, group=group, async_op=True)], about)()
    return [
        pickle.loads(bytes(text[: int(length)].tolist()))
        for text, length in zip(texts, lengths, strict=True)
    ]


def _turns(group: Group) -> Iterator[tuple[int, int]]:
    """Whom to send to and whom to receive from, turn by turn; in each, every rank has one of both.
    The sources come in the order rank - 1, rank - 2, ..."""
    rank, world_size = group.rank(), group.size()
    for distance in range(1, world_size):
        yield (rank + distance) % world_size, (rank - distance) % world_size


def _exchange(
    sent: Tensor, to: int, received: Tensor, source: int, group: Group, tag: int
) -> list[dist.Work]:
    # What dist.isend and dist.irecv do after their checks, which take longer than a small message.
    return [group.send([sent], to, tag), group.recv([received], source, tag)]


def _native(tensor: Tensor) -> bool:
    return NATIVE or tensor.device.type != "cpu"


def _other(group: Group, label: str) -> Message:
    return Message(group, 0, Kind.OTHER, 1, label)


def _wait_for(works: Sequence[dist.Work | None], message: Message) -> Finish:
    def finish() -> None:
        deadlock_watch.waiting = message
        try:
            for work in works:
                if work is not None:  # a rank outside of the group has none
                    work.wait()
        except RuntimeError as error:
            raise deadlock_watch.explain(message, error) from error
        finally:
            deadlock_watch.waiting = None

    return finish

"""From one way to divide a tensor among ranks to another.

A rank has some pieces of a tensor, and wants others. It knows what all ranks have and want, so it
sends to each rank exactly the pieces of its own that this rank wants::

    has      rank 0: a a b b c          rank 1: c x y z
    wants    rank 0: a a b b | x y      rank 1: c c | z          rank 0 sends c, rank 1 sends x y

If every rank wants as much as it has, an all-gather would send more: by a factor of the number of
ranks. Only what stays on its rank is copied.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.comm import collectives
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.transport import Work, wait_for
from minifsdp.core.collectives import Group

Pieces = Sequence[range]
"""Which elements of the whole tensor a rank has, in the order in which it has them."""
Parts = list[list[Tensor]]
"""Views ``[n]``: a list of those that go to each rank, or come from it."""


def redistribute(
    own: Sequence[Tensor],
    have: Sequence[Pieces],
    want: Sequence[Pieces],
    group: Group | None,
    label: str,
) -> list[Tensor]:
    """Give each rank the pieces that it wants. All ranks of the group take part.

    Args:
        own: the pieces of this rank, each ``[n]``, of one dtype.
        have: of each rank. An element that several ranks have is sent by all of them, so let only
            one have it.
        want: of each rank. Several ranks may want the same element.
        group: the ranks; None if there is only one.
        label: what is redistributed, for errors.

    Returns:
        New tensors, the pieces that this rank wants, where ``own`` is.

    Raises:
        RuntimeError: another rank does not take part; see deadlock_watch.py.
    """
    rank = group.rank() if group is not None else 0
    wanted = [own[0].new_empty(len(piece)) for piece in want[rank]]
    leaving = [_overlaps(own, have[rank], pieces) for pieces in want]
    arriving = [_overlaps(wanted, want[rank], pieces) for pieces in have]
    for part, place in zip(leaving[rank], arriving[rank], strict=True):
        place.copy_(part)
    if group is not None:
        leaving[rank], arriving[rank] = [], []
        _send(leaving, arriving, own[0], group, label)
    return wanted


def _overlaps(tensors: Sequence[Tensor], pieces: Pieces, others: Pieces) -> list[Tensor]:
    """Views of what is both in ``pieces`` and in ``others``, in the order of the whole tensor."""
    found = sorted(_common(pieces, others))
    return [
        tensors[number][start - pieces[number].start : stop - pieces[number].start]
        for start, stop, number in found
    ]


def _common(pieces: Pieces, others: Pieces) -> Iterator[tuple[int, int, int]]:
    for number, piece in enumerate(pieces):
        for other in others:
            start, stop = max(piece.start, other.start), min(piece.stop, other.stop)
            if start < stop:
                yield start, stop, number


def _send(leaving: Parts, arriving: Parts, like: Tensor, group: Group, label: str) -> None:
    """Send parts to each rank, and fill those that come from each. On a CPU directly, as in
    collectives.py; else torch's own, which needs the parts end to end.

    Args:
        like: a tensor of the dtype and on the device of all parts.
    """
    message = Message(group, 0, Kind.OTHER, like.itemsize, label)
    if collectives.NATIVE or like.device.type != "cpu":
        _send_end_to_end(leaving, arriving, like, message)
        return
    works: list[Work] = []
    for source, places in enumerate(arriving):
        works += [group.recv([place], source, message.tag) for place in places]
    for to, parts in enumerate(leaving):
        works += [group.send([part], to, message.tag) for part in parts]
    wait_for(works, message)()


def _send_end_to_end(leaving: Parts, arriving: Parts, like: Tensor, message: Message) -> None:
    empty, size = like.new_empty(0), like.itemsize
    sent = torch.cat([part for to_one in leaving for part in to_one] or [empty])
    places = [place for of_one in arriving for place in of_one]
    received = sent.new_empty(sum(place.numel() for place in places))
    work = dist.all_to_all_single(  # as bytes: gloo does not know every dtype
        received.view(torch.uint8),
        sent.view(torch.uint8),
        output_split_sizes=[sum(part.numel() for part in of_one) * size for of_one in arriving],
        input_split_sizes=[sum(part.numel() for part in to_one) * size for to_one in leaving],
        group=message.group,
        async_op=True,
    )
    wait_for([work], message)()
    pieces = torch.split(received, [place.numel() for place in places])
    for place, piece in zip(places, pieces, strict=True):
        place.copy_(piece)

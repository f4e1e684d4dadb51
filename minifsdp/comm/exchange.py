"""From one way to divide a tensor among ranks to another, in one message from each rank to each.

A rank has some pieces of a tensor, and wants others. It knows what all ranks have and want, so it
sends to each exactly what that one wants of its own::

    has      rank 0: a a b b c          rank 1: c x y z
    wants    rank 0: a a b b | x y      rank 1: c c | z          rank 0 sends c, rank 1 sends x y

Where every rank gets as much as it gives, a gather would send as many times more as there are
ranks.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.comm import deadlock_watch
from minifsdp.comm.collectives import Group
from minifsdp.comm.message_tags import Kind, Message

Pieces = Sequence[range]
"""Which elements of the whole tensor a rank has, in the order in which it has them."""


def exchange(
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
        group: the ranks; None if there is one.
        label: what it is, for errors.

    Returns:
        New tensors, the pieces that this rank wants, where ``own`` is.

    Raises:
        RuntimeError: another rank does not take part; see deadlock_watch.py.
    """
    rank = group.rank() if group is not None else 0
    wanted = [own[0].new_empty(len(piece)) for piece in want[rank]]
    sent = [_overlaps(own, have[rank], pieces) for pieces in want]
    places = [_overlaps(wanted, want[rank], pieces) for pieces in have]
    given = torch.cat([part for to_one in sent for part in to_one] or [own[0][:0]])
    if group is not None:
        given = _send(given, _numels(sent), _numels(places), group, label)
    flat = [place for of_one in places for place in of_one]
    for place, part in zip(
        flat, torch.split(given, [place.numel() for place in flat]), strict=True
    ):
        place.copy_(part)
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


def _numels(parts: list[list[Tensor]]) -> list[int]:
    return [sum(part.numel() for part in of_one) for of_one in parts]


def _send(
    given: Tensor, leaving: list[int], arriving: list[int], group: Group, label: str
) -> Tensor:
    """Send the first ``leaving[0]`` elements to the first rank, and so on; return what arrives."""
    received = given.new_empty(sum(arriving))
    size = given.itemsize
    message = Message(group, 0, Kind.OTHER, 1, label)
    deadlock_watch.waiting = message
    try:  # as bytes: gloo does not know every dtype
        dist.all_to_all_single(
            received.view(torch.uint8),
            given.view(torch.uint8),
            output_split_sizes=[numel * size for numel in arriving],
            input_split_sizes=[numel * size for numel in leaving],
            group=group,
        )
    except RuntimeError as error:
        raise deadlock_watch.explain(message, error) from error
    finally:
        deadlock_watch.waiting = None
    return received

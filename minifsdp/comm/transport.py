"""What carries a message from one rank to another: gloo, or memory that the other rank reads.

collectives.py says who sends what to whom. Here each of these messages is started, and waited for.

Ranks on one machine only lend what they have (same_machine.py). A rank that has received all it
waits for could go on at once, and let the others read its part later. But before a rank changes or
frees memory that it has lent, it has to wait until the others have read it. A gradient is freed
after it has been reduced, so the rank waits at once. A shard changes only when an optimizer steps,
so the rank waits for all shards together, at the end of a backward (:func:`wait_for_readers`).
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from minifsdp.comm import deadlock_watch, same_machine
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.same_machine import Fetch, Loan, Places, RankLost
from minifsdp.core.streams import Finish

Work = dist.Work | Loan | Fetch


def send_recv(
    sent: Sequence[Tensor], to: int, places: Places, source: int, message: Message
) -> list[Work]:
    """Start to send some tensors to one rank of the message's group, and to receive others from the
    same rank or a different one. All of them are contiguous.

    Args:
        places: returns the tensors to receive. It is called when there is something to write to
            them: with gloo at once; for a rank on this machine, when its message is waited for.
    """
    group, tag, near = message.group, message.tag, same_machine.neighbors.get(message.group, {})
    # This is what dist.isend and dist.irecv do after checks that take longer than a small message.
    # Messages of one tag arrive in the order in which they were sent.
    #
    # Receives first. gloo tells the sender that it may begin, on the connection that this rank's
    # own data takes. Sent after that data, it would arrive only after all of it: the two directions
    # of the link would take turns. Receives are waited for after sends: of three ranks that have
    # parted ways, one that waits for a receive may not hear that the connections were closed.
    received = () if source in near else places()
    try:
        receives = [group.recv([tensor], source, tag) for tensor in received]
        sends = [] if to in near else [group.send([tensor], to, tag) for tensor in sent]
    except RuntimeError as error:  # the other rank has ended, and gloo knows that already
        raise deadlock_watch.explain_wait(message, error) from error
    works: list[Work] = [*sends, *receives]
    if source in near:
        works.append(Fetch(near[source], places, message))
    if to in near:
        before = near[to].loan_before(message)
        if before is not None:
            _finish([before.wait_until_read], before.message)
        works.append(Loan(near[to], sent, message))
    return works


def wait_for(works: Sequence[Work | None], message: Message) -> Finish:
    """The function that waits for what was started for a message. For a message of parameters, the
    function does not wait until others have read this rank's part; :func:`wait_for_readers` does.

    Raises:
        RuntimeError: (the function does) another rank does not take part, has ended, or is in
            another collective; see deadlock_watch.py. What fails on this rank, such as an
            allocation, is raised as it is.
    """
    deadlock_watch.unfinished[message] = works
    if message.kind is Kind.PARAMETERS:
        works = [work for work in works if not isinstance(work, Loan)]
    # Fetches first, and loans last: a loan waits until the other rank has read it, or has a copy.
    ordered = sorted(works, key=lambda work: isinstance(work, Loan) - isinstance(work, Fetch))
    waits = [work.wait for work in ordered if work is not None]  # None: this rank is not in it

    def finish() -> None:
        try:
            _finish(waits, message)
        finally:
            for work in ordered:
                if isinstance(work, Fetch):
                    work.drop()  # matters only if a wait has failed; otherwise it has been read

    return finish


def watched(wait: Finish, message: Message) -> Finish:
    """The same function, for a collective of torch's own; see :func:`wait_for`.

    Args:
        wait: of the ``dist.Work``.
    """
    deadlock_watch.unfinished[message] = [wait]
    return partial(_finish, [wait], message)


def wait_for_readers() -> None:
    """Wait until other ranks have read all parameters that were lent to them, or there is a copy
    for them."""
    for neighbors in list(same_machine.neighbors.values()):
        for neighbor in neighbors.values():
            for loan in list(neighbor.loans.values()):
                if loan.message.kind is Kind.PARAMETERS:
                    loan.wait()


def _finish(waits: Sequence[Callable[[], object]], message: Message) -> None:
    thread, wait = threading.get_ident(), None
    deadlock_watch.waiting[thread] = message
    try:
        for wait in waits:
            wait()
    except RuntimeError as error:
        # All errors of gloo's waits are about other ranks. A rank that reads memory may also fail
        # for a reason of its own: it allocates, and runs operations that a program's modes can see.
        if isinstance(error, RankLost) or isinstance(getattr(wait, "__self__", None), dist.Work):
            raise deadlock_watch.explain_wait(message, error) from error
        raise
    finally:
        deadlock_watch.waiting.pop(thread, None)
        deadlock_watch.unfinished.pop(message, None)

"""How ranks compare what they have, and come to the same result.

If a check fails on one rank only, that rank raises and the others wait for it until a timeout. So
whatever may differ between ranks is decided by all of them together. There are two ways:

:func:`consensus` goes through the *store* of the process group, the key-value server at which the
ranks found each other. Each rank writes a note, the first rank reads all of them and writes the
result, and each rank reads that. It is slow, so it is for what happens once: when a model is
wrapped, before its first step, after an exception, after an optimizer has loaded its state. It
works where collectives do not: ranks may hold different process groups, or be at different places
in the program, and still no note is mistaken for another one. deadlock_watch.py notices a rank
that never comes.

:func:`gather_numbers` goes through small tensors with tags of their own, so it is fast enough for
each backward and for each layer of the first steps.

Both take a list of process groups. In a grid of ranks (groups.py) there may be no group of all
ranks, so each rank compares within its row first, and then hands the row's result in to its
column. Here rank 1 has found a problem::

    own             after the rows       after the columns
    -  problem      problem  problem     problem  problem
    -  -            -        -           problem  problem
"""

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from minifsdp.comm import deadlock_watch
from minifsdp.comm.collectives import gather
from minifsdp.comm.message_tags import Kind, Message, check_exists
from minifsdp.core.collectives import Group

Own = TypeVar("Own")
Agreed = TypeVar("Agreed")


def groups_with_peers(groups: Iterable[Group | None]) -> list[Group]:
    """The groups in which there is another rank that answers.

    The ranks of torch's "fake" backend, which sim/ uses, never answer.

    Raises:
        RuntimeError: one of them was destroyed.
    """
    found = [group for group in groups if group is not None and group.size() > 1]
    for group in found:
        check_exists(group)
    return [group for group in found if "fake" not in dist.get_backend_config(group)]


def consensus(
    groups: Iterable[Group | None],
    about: str,
    own: Own,
    agreed: Agreed,
    judge: Callable[[list[Own], list[Agreed]], Agreed],
) -> Agreed:
    """Come to the same result on all ranks of some groups. Slow; all of the ranks have to call it.

    Args:
        groups: handled one after the other, so the group of all ranks should come last.
        about: what is compared, in words. It keeps apart notes about different things, so it has to
            be the same on all ranks.
        own: what this rank has to say. It is pickled.
        agreed: what was agreed before, or would be if there were no other ranks.
        judge: called on each group's first rank, with ``own`` and ``agreed`` of all its ranks, in
            the order of the group. What it returns is the new ``agreed`` of the whole group.

    Raises:
        RuntimeError: some rank does not come, because it waits somewhere else.
    """
    for group in groups_with_peers(groups):
        agreed = _ask_all(group, about, (own, agreed), judge)
    return agreed


def first_problem(groups: Iterable[Group | None], about: str, problem: str | None) -> str | None:
    """The first problem that any rank of the groups has; None if no rank has one."""
    return consensus(groups, about, None, problem, lambda _, found: next(filter(None, found), None))


def gather_objects(mine: Own, group: Group, about: str = "an exchange of objects") -> list[Own]:
    """The objects of all ranks of a group, in the order of the group. Slow."""
    # (torch's own all_gather_object needs NumPy, which is no dependency of torch.)
    return consensus([group], about, mine, [mine], lambda objects, _: objects)


def gather_numbers(
    groups: Sequence[Group], mine: list[int], device: torch.device, tag: int, about: str, kind: Kind
) -> dict[int, list[int]]:
    """The numbers of all ranks of some groups, by rank, through small tensors.

    Args:
        mine: equally many numbers on all ranks.
        device: one that the groups can send from.
        tag, kind: these make up the tag of the message; see message_tags.py.
        about: what the numbers are, in words.
    """
    for group in groups:
        check_exists(group)  # first: without a process group dist.get_rank() fails
    rows = [[dist.get_rank(), *mine]]
    for group in groups:
        sent = torch.tensor(rows, device=device).view(-1)
        received = sent.new_empty(group.size() * sent.numel())
        gather(received, sent, group, tag, about, kind)
        rows = received.view(-1, 1 + len(mine)).tolist()
    return {rank: numbers for rank, *numbers in rows}


def _ask_all(group: Group, about: str, note: Any, judge: Callable[..., Any]) -> Any:
    ranks = dist.get_process_group_ranks(group)
    message = Message(group, 0, Kind.STORE, 1, f"{about} with the ranks {ranks}")
    key = f"minifsdp/consensus/{message.label}/{message.count}"
    store: Any = dist.distributed_c10d._get_default_store()
    thread = threading.get_ident()
    deadlock_watch.waiting[thread] = message
    try:
        if dist.get_rank() != ranks[0]:
            store.set(f"{key}/{dist.get_rank()}", pickle.dumps(note))
        else:
            notes = [note]
            for rank in ranks[1:]:
                notes.append(_read(store, f"{key}/{rank}", message))
                store.delete_key(f"{key}/{rank}")  # else a long run would fill the store
            owns, agreed = zip(*notes, strict=True)
            store.set(key, pickle.dumps(judge(list(owns), list(agreed))))
            # All have come here, so all have read the result before this one. Deleted as above.
            store.delete_key(f"minifsdp/consensus/{message.label}/{message.count - 1}")
        return _read(store, key, message)
    except RuntimeError:
        if message.verdict is not None:
            # Not all ranks have come, so some have not counted it. A later one of this label, in a
            # new process group, has to have the same number on all ranks, and new notes.
            message.uncount()
            store.delete_key(f"{key}/{dist.get_rank()}")
        raise
    finally:
        deadlock_watch.waiting.pop(thread, None)


def _read(store: Any, key: str, message: Message) -> Any:
    # store.wait() would wait in C++, where deadlock_watch.py cannot end it.
    pause, deadline = 0.0005, time.monotonic() + store.timeout.total_seconds()
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if message.verdict is not None or time.monotonic() > deadline:
            raise deadlock_watch.explain_wait(message, TimeoutError("nobody came in time"))
    return pickle.loads(store.get(key))

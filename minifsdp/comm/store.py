"""Notes: what ranks tell each other through the store of the process group.

The store is where ranks found each other in the beginning. It is slow, and no collective: a rank
reads and writes it by itself, so that ranks which are about to find out that they hold different
groups, or are in different places, cannot take one message for another meanwhile. So it is used
once for each model, and after an exception.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from minifsdp.comm import deadlock_watch
from minifsdp.comm.message_tags import Kind, Message

Note = TypeVar("Note")
Outcome = TypeVar("Outcome")


def exchange(
    group: dist.ProcessGroup, about: str, mine: Note, judge: Callable[[list[Note]], Outcome]
) -> Outcome:
    """Hand in a note, and hear what the group's first rank makes of all of them.

    Args:
        about: what it is, for errors.
        mine: this rank's.
        judge: given all notes, by rank in the group; runs on the first rank only.

    Raises:
        RuntimeError: some rank does not come, because it is elsewhere.
    """
    ranks = dist.get_process_group_ranks(group)
    message = Message(group, 0, Kind.NOTES, 1, f"{about} with the ranks {ranks}")
    key = f"minifsdp/notes/{message.key[0]}/{message.count}"
    store: Any = dist.distributed_c10d._get_default_store()
    deadlock_watch.waiting = message
    try:
        if dist.get_rank() != ranks[0]:
            store.set(f"{key}/{dist.get_rank()}", pickle.dumps(mine))
        else:
            said = [mine]
            for rank in ranks[1:]:
                said.append(pickle.loads(_read(store, f"{key}/{rank}", message)))
                store.delete_key(f"{key}/{rank}")
            store.set(key, pickle.dumps(judge(said)))
        outcome: Outcome = pickle.loads(_read(store, key, message))
        return outcome
    finally:
        deadlock_watch.waiting = None


def _read(store: Any, key: str, message: Message) -> bytes:
    pause, deadline = 0.0005, time.monotonic() + store.timeout.total_seconds()
    while not store.check([key]):  # and not store.wait(), which nobody could end
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        if message.verdict is not None or time.monotonic() > deadline:
            raise deadlock_watch.explain(message, TimeoutError("nobody came in time"))
    found: bytes = store.get(key)
    return found

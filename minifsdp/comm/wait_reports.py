"""What a waiting rank reports of itself, and which ranks these reports prove to be in a deadlock.

That two ranks wait proves nothing, because one of them may wait for bytes that are on their way. So
a report also says how many messages of each kind its rank has started. A rank that waits for a
message goes on only after the other ranks have started that message::

    rank 0   waits for gather 7 of unit a        has started reduction 3 of unit b
    rank 1   waits for reduction 4 of unit b     has started gather 6 of unit a

Rank 1 has not started gather 7 and cannot start it while it waits; neither has rank 0 started
reduction 4. Neither of them will ever go on. This is true however old the reports are: whichever
rank went on first would have needed a message that the other rank had not started. (It is not true
any more once a verdict has ended their waits; see deadlock_watch.py.)

A rank may run several models, each in a thread and in process groups of its own. Then it reports
when all of these threads wait, and is in a deadlock if none of them can go on.

Calls of torch's own collectives by the user, such as ``dist.barrier()``, are not counted. They are
recognized in the stack of a thread instead.
"""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from minifsdp.comm.message_tags import Key, Message, owners, started

_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = re.compile(
    "all_gather.*|all_reduce|all_to_all.*|barrier|broadcast.*|destroy_process_group|gather.*|"
    "monitored_barrier|new_group|reduce.*|scatter.*"
)


class TorchCollective(NamedTuple):
    """A call of one of torch's own collectives that a thread is in."""

    place: tuple[int, int]  # the frame, and the instruction in it: the same while the call lasts
    name: str
    ranks: tuple[int, ...]


Waits = dict[int, Message | TorchCollective]
"""What the threads of a rank wait for, by the identifier of the thread."""


class Awaited(NamedTuple):
    """What one thread waits for."""

    text: str  # in words, with the line of the program
    ranks: tuple[int, ...]  # all of them have to take part
    message: tuple[Key, int] | None  # its key and its count; None: torch's own
    group: str = ""  # the name of the process group of a message


class WaitReport(NamedTuple):
    """What a rank reports of itself while it waits.

    It is published through the store as a pickle, so it has plain values only.
    """

    awaited: tuple[Awaited, ...]  # at least one
    started: dict[Key, int]
    answered: int  # how many times the rank had been asked for a new report before this one

    @staticmethod
    def on(waits: Waits, answered: int) -> "WaitReport":
        """This rank's report on its waits."""
        awaited = (_awaited(wait, _frame_of(thread)) for thread, wait in waits.items())
        return WaitReport(tuple(awaited), dict(started), answered)

    @property
    def ranks(self) -> set[int]:
        """The ranks that have to take part."""
        return {rank for awaited in self.awaited for rank in awaited.ranks}

    @property
    def in_torch(self) -> bool:
        """Whether it waits in a collective of torch's own."""
        return any(awaited.message is None for awaited in self.awaited)

    def __str__(self) -> str:
        return " and in ".join(awaited.text for awaited in self.awaited)


def _awaited(wait: Message | TorchCollective, frame: FrameType | None) -> Awaited:
    place = called_from(frame)
    if isinstance(wait, Message):
        ranks = tuple(dist.get_process_group_ranks(wait.group))
        return Awaited(f"{wait}{place}", ranks, (wait.key, wait.count), wait.group.group_name)
    return Awaited(f"torch.distributed.{wait.name}(){place}", wait.ranks, None)


def deadlocked(reports: dict[int, WaitReport]) -> set[int]:
    """The ranks that can never go on.

    Args:
        reports: of waiting ranks, by rank. Ranks without one are taken to be busy.

    Returns:
        The largest set of ranks in which each waits for another one of the set.
    """
    # Begin with all waiting ranks, and take out those that wait for none of the rest, until each of
    # the remaining ones waits for another one of them.
    found = set(reports)
    while True:
        free = {
            rank
            for rank in found
            if not all(found & _missing(rank, one, reports) for one in reports[rank].awaited)
        }
        if not free:
            return found
        found -= free


def _missing(rank: int, awaited: Awaited, reports: dict[int, WaitReport]) -> set[int]:
    """The waiting ranks that have not started what a thread of ``rank`` waits for."""
    missing = set()
    for other in awaited.ranks:
        theirs = reports.get(other)
        if other == rank or theirs is None:
            continue
        if awaited.message is None:
            if not theirs.in_torch:
                missing.add(other)
        elif theirs.started.get(awaited.message[0], 0) < awaited.message[1]:
            missing.add(other)
    return missing


def all_waits(waiting: dict[int, Message]) -> Waits:
    """What each thread of this rank that runs a model waits for; empty if one does not wait.

    Args:
        waiting: the messages that threads wait for now.
    """
    alive, main = set(sys._current_frames()), threading.main_thread().ident or 0
    waits: Waits = {}
    # The main thread, if none has run a model: it may be in one of torch's own collectives.
    for thread in sorted(alive & set(owners.values())) or [main]:
        wait = waiting.get(thread) or torch_collective(_frame_of(thread))
        if wait is None:
            return {}
        waits[thread] = wait
    return waits


def _frame_of(thread: int) -> FrameType | None:
    """Where a thread is. No variable keeps the frames of all threads: this function's own frame is
    among them, and that cycle would keep alive what all frames refer to, parameters too, until the
    garbage collector comes."""
    return sys._current_frames().get(thread)


def torch_collective(frame: FrameType | None) -> TorchCollective | None:
    """The collective of torch's own that a thread is in; None if it is in none.

    Args:
        frame: where the thread is.
    """
    # Look only at the frames of torch on top of the stack. Below them is the user's code, whose
    # functions may have the same names.
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        code = frame.f_code
        if _COLLECTIVES.fullmatch(code.co_name) and code.co_filename.endswith("_c10d.py"):
            group = frame.f_locals.get("group")
            if not isinstance(group, dist.ProcessGroup):
                group = dist.group.WORLD
            if group is None:
                return None
            ranks = tuple(dist.get_process_group_ranks(group))
            return TorchCollective((id(frame), frame.f_lasti), code.co_name, ranks)
        frame = frame.f_back
    return None


def called_from(frame: FrameType | None) -> str:
    """The innermost line in a stack that is neither torch's nor this package's, in words."""
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", called from {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

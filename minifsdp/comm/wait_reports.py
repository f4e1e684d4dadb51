"""What a waiting rank reports of itself, and which ranks are in a deadlock by these reports.

That two ranks wait proves nothing, because one of them may wait for bytes that are on their way. So
a report also says how many messages of each kind its rank has started. A rank that waits for a
message goes on only after the other ranks have started that message::

    rank 0   waits for gather 7 of unit a        has started reduction 3 of unit b
    rank 1   waits for reduction 4 of unit b     has started gather 6 of unit a

Rank 1 has not started gather 7 and cannot start it while it waits, and so it is with rank 0 and
reduction 4. Neither will ever go on. This is true however old the reports are: whichever of the two
went on first would have needed what the other one had not started.

Calls of torch's own collectives by the user, such as ``dist.barrier()``, are not counted. They are
recognized in the main thread's stack instead.
"""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from minifsdp.comm.message_tags import Key, Message, started

_PACKAGE = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = re.compile(
    "all_gather.*|all_reduce|all_to_all.*|barrier|broadcast.*|destroy_process_group|gather.*|"
    "monitored_barrier|new_group|reduce.*|scatter.*"
)


class TorchCollective(NamedTuple):
    """A call of one of torch's own collectives that the main thread is in."""

    place: tuple[int, int]  # the frame, and the instruction in it: the same as long as it lasts
    name: str
    ranks: tuple[int, ...]


Wait = Message | TorchCollective
"""What the main thread may wait for."""


class WaitReport(NamedTuple):
    """What a rank reports of itself while it waits.

    It is published through the store as a pickle, so it has plain values only.
    """

    waits_for: str  # in words, with the line of the program
    ranks: tuple[int, ...]  # all of them have to take part
    awaited: tuple[Key, int] | None  # the key of the message and its count; None: torch's own
    started: dict[Key, int]
    answered: int  # how many questions whether the rank still waits came before this report

    @staticmethod
    def on(wait: Wait, answered: int) -> "WaitReport":
        """This rank's report on its wait."""
        if isinstance(wait, Message):
            ranks = tuple(dist.get_process_group_ranks(wait.group))
            text, awaited = str(wait), (wait.key, wait.count)
        else:
            text, ranks, awaited = f"torch.distributed.{wait.name}()", wait.ranks, None
        text += called_from(main_thread_frame())
        return WaitReport(text, ranks, awaited, dict(started), answered)


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
        free = {rank for rank in found if not any(o in found for o in _missing(rank, reports))}
        if not free:
            return found
        found -= free


def _missing(rank: int, reports: dict[int, WaitReport]) -> list[int]:
    """The waiting ranks that have not started what ``rank`` waits for."""
    report, missing = reports[rank], []
    for other in report.ranks:
        theirs = reports.get(other)
        if other == rank or theirs is None:
            continue
        if report.awaited is None:
            if theirs.awaited is not None:  # it is not in a collective of torch's
                missing.append(other)
        elif theirs.started.get(report.awaited[0], 0) < report.awaited[1]:
            missing.append(other)
    return missing


def torch_collective() -> TorchCollective | None:
    """The collective of torch's own that the main thread is in; None if it is in none."""
    # Look only at the frames of torch on top of the stack. Below them is the user's code, whose
    # functions may have the same names.
    frame = main_thread_frame()
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


def main_thread_frame() -> FrameType | None:
    """Where the main thread is. Ranks wait there; a backward on a CPU runs there, too."""
    return sys._current_frames().get(threading.main_thread().ident or 0)

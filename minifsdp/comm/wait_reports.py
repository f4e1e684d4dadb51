"""What a rank says of itself while it waits, and what follows from what several ranks say.

Two ranks that wait are no proof of anything: one of them may wait for bytes that are on their way.
So a report says what has been started, too. If rank 0 waits for a message that rank 1 has not
started, rank 0 goes on only after rank 1 does. If rank 1 waits for rank 0 in the same way, neither
does. This holds however old the reports are: whichever of the two had gone on first would have
needed what the other one had not started.
"""

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from minifsdp.comm.message_tags import Key

_HERE = str(Path(__file__).parent.parent)  # the package
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = re.compile(
    "all_gather.*|all_reduce|all_to_all.*|barrier|broadcast.*|destroy_process_group|gather.*|"
    "monitored_barrier|new_group|reduce.*|scatter.*"
)


class Elsewhere(NamedTuple):
    """A call of torch's own collectives."""

    place: tuple[int, int]  # the frame, and where it is
    name: str
    ranks: tuple[int, ...]


class Report(NamedTuple):
    """What a rank says of itself while it waits."""

    what: str
    ranks: tuple[int, ...]  # all of them have to take part
    awaited: tuple[Key, int] | None  # None: a call of torch's own
    started: dict[Key, int]
    asked: int  # how often others had asked whether it is still so


def stuck(reports: dict[int, Report]) -> set[int]:
    """The ranks that wait in vain: each for one that waits for one ... that waits for it."""
    found = set(reports)
    while True:
        free = {rank for rank in found if not any(o in found for o in _missing(rank, reports))}
        if not free:
            return found
        found -= free


def _missing(rank: int, reports: dict[int, Report]) -> list[int]:
    """The ranks that have not started what ``rank`` waits for."""
    report, missing = reports[rank], []
    for other in report.ranks:
        theirs = reports.get(other)
        if other == rank or theirs is None:
            continue
        if report.awaited is None:
            if theirs.awaited is not None:  # it is not in torch's collective, nor will it be
                missing.append(other)
        elif theirs.started.get(report.awaited[0], 0) < report.awaited[1]:
            missing.append(other)
    return missing


def elsewhere() -> Elsewhere | None:
    """The collective of torch's own that the main thread is in, if any."""
    frame = main_frame()
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        code = frame.f_code
        if _COLLECTIVES.fullmatch(code.co_name) and code.co_filename.endswith("_c10d.py"):
            group = frame.f_locals.get("group")
            if not isinstance(group, dist.ProcessGroup):
                group = dist.group.WORLD
            if group is None:
                return None
            ranks = tuple(dist.get_process_group_ranks(group))
            return Elsewhere((id(frame), frame.f_lasti), code.co_name, ranks)
        frame = frame.f_back
    return None


def where(frame: FrameType | None) -> str:
    """The line of the user's that a stack comes from."""
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", called from {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def main_frame() -> FrameType | None:
    """Where the main thread is. Ranks wait there; a backward on a CPU runs there, too."""
    return sys._current_frames().get(threading.main_thread().ident or 0)

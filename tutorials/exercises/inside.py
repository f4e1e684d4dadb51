"""What the processes do that run a check: limit themselves, look, and write down what they see.

sandbox.py forks them, and ends those that take too long. They never return.
"""

import faulthandler
import os
import resource
import signal
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tutorials.exercises import observe
from tutorials.exercises.catalog import Check
from tutorials.exercises.observe import Seen, plain
from tutorials.exercises.overlay import Layer, Overlay

MEMORY = 2 << 30
"""Bytes that a process may allocate, on top of what torch has mapped."""

STACKS = signal.SIGUSR1
"""Has the ranks write down where they are, each to its file stack.<rank>."""


@dataclass(frozen=True, eq=False)
class Job:
    """One check to run.

    Attributes:
        layers: the student's files; none for the reference.
        folder: the student's, by which the lines of errors are found.
        seed: of the random numbers that the check uses.
    """

    check: Check
    layers: dict[str, Layer]
    folder: Path | None
    seed: int


def lead(job: Job, out: Path) -> None:
    """Start the ranks and wait for them. Does not return."""
    signal.signal(STACKS, signal.SIG_IGN)  # which is for the ranks
    os.setsid()  # a group of its own, which can be killed with all that it has started
    children = {}
    for rank in range(job.check.ranks):
        process = os.fork()
        if not process:
            _be_a_rank(job, rank, out)
        children[process] = rank
    while children:
        process, status = os.wait()
        if process in children:
            code = os.waitstatus_to_exitcode(status)
            (out / f"code.{children.pop(process)}").write_text(str(code))
    os._exit(0)


def _be_a_rank(job: Job, rank: int, out: Path) -> None:
    """Look, and write down what was seen. Does not return."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # a student's prints are none of the grader's
            os.dup2(null, stream)
        _limit_memory()
        stack = (out / f"stack.{rank}").open("w")
        # Of other threads it reads frames that may be gone by then, which has ended a rank.
        faulthandler.register(STACKS, file=stack, all_threads=False)
        _look(job, rank, out)
        (out / f"seen.{rank}.partly").rename(out / f"seen.{rank}")
        code = 0
    finally:
        os._exit(code)


def _look(job: Job, rank: int, out: Path) -> None:
    """Write each observation down as it is made: a hang may follow."""
    seen: list[Seen] = []

    def note(entry: Seen) -> None:
        seen.append(entry)
        half = out / f"half.{rank}"  # of a file, which would be read as none
        torch.save([tuple(entry) for entry in seen], half)
        half.rename(out / f"seen.{rank}.partly")

    try:
        Overlay(job.layers).install()
        observe.reference = not job.layers
        torch.manual_seed(job.seed)
        if job.check.ranks > 1:
            store = dist.FileStore(str(out / "store"), job.check.ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=job.check.ranks,
                timeout=timedelta(hours=1),  # a rank may be slow; sandbox.py ends what hangs
            )  # fmt: skip
        for entry in job.check.function():
            entry = entry if isinstance(entry, Seen) else Seen(*entry)
            note(entry._replace(value=plain(entry.value)))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        at = _where(error, job.folder)
        note(Seen("", {"raised": type(error).__name__, "message": str(error), "at": at}))


def _where(error: BaseException, folder: Path | None) -> str:
    """The innermost line of the student's files that an exception has come through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if folder is not None and Path(frame.filename).parent == folder:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def _limit_memory() -> None:
    with suppress(OSError):  # only Linux says how much torch has mapped
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

"""Processes that run a check, with the student's functions or without, and report what they see.

A student's program may do anything: loop for ever, end Python, fill the memory, print, wait for a
rank that never comes. So each check runs in processes of its own, forked from this one, which has
imported torch already (a new Python would take seconds to do that) and never runs what a student
has written. What comes back is data: a file for each rank, read without executing anything. So a
check cannot be passed by changing the grader, in memory or on disk: what counts is what was seen.

What takes too long is ended. The limit is in seconds of an idle machine (tests/patience.py): on a
busy one it is later by the clock. What is ended outside of the student's files may have been slow
for another reason than a mistake. It is run once more, and if it does not end then either, nobody
knows whether it is right: it is inconclusive.
"""

import ctypes
import gc
import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from minifsdp.sim.cli.terminal import out_of_reach
from tests.patience import Patience
from tutorials.exercises.inside import STACKS, Job, lead
from tutorials.exercises.observe import Seen

CHECKS = Path(__file__).parent / "checks"
SHORT = 3.0  # seconds of an idle machine, within which most checks are over


class Report(NamedTuple):
    """What came of a job: the observations of each rank, and why there are no more.

    Attributes:
        ranks: of each rank its observations, also if it has not come to its end; None if it has
            made none that can be read.
        ended: what happened instead, in one line; empty if all went well.
        inconclusive: it was ended outside of the student's files, where it may only have been slow.
    """

    ranks: list[list[Seen] | None]
    ended: str
    inconclusive: bool = False


@dataclass(eq=False)
class _Running:
    job: Job
    process: int
    out: tempfile.TemporaryDirectory[str]
    seconds: float  # it may take
    patience: Patience
    again: bool  # it was inconclusive before
    asked: bool = False  # ranks write down where they are

    @property
    def has_a_place(self) -> bool:
        """Whether it still counts as one of those that run at a time. What has run for long waits,
        as a rule: for a rank that will not come, until its time is over."""
        return self.seconds - self.patience.left < SHORT

    def is_late(self) -> bool:
        """Whether it is to be ended now. Before that, its ranks say where they are."""
        self.patience.count()
        if self.patience.left or self.asked:
            return not self.patience.left
        self.asked, self.patience = True, Patience(1)
        with suppress(ProcessLookupError):
            os.killpg(self.process, STACKS)
        return False


def run_all(jobs: Iterable[Job], workers: int, patience: float = 1) -> Iterator[tuple[Job, Report]]:
    """Run jobs, ``workers`` processes or so at a time. Yields each with its report, in the order in
    which they end. What is inconclusive is run a second time.

    Args:
        jobs: taken one by one, when there is room for the next; so what comes may depend on the
            reports of those before.
        patience: by how much slower this machine is than a laptop, if it has nothing else to do.
    """
    prepare()
    _adopt_orphans()
    waiting, more = iter(jobs), True
    running: list[_Running] = []
    try:
        while more or running:
            while more and _is_room(running, workers):
                job = next(waiting, None)
                more = job is not None
                if job is not None:
                    running.append(_start(job, patience))
            time.sleep(0.005)
            for run in list(running):
                ended, status = os.waitpid(run.process, os.WNOHANG)
                if not (ended or run.is_late()):
                    continue
                running.remove(run)
                report = _finish(run, status if ended else None)
                if report.inconclusive and not run.again:
                    running.append(_start(run.job, patience, again=True))
                else:
                    yield run.job, report
    finally:
        for run in running:
            _finish(run, None)
        _kill_descendants()


def _is_room(running: Sequence[_Running], workers: int) -> bool:
    """Whether one more may start."""
    there = sum(run.job.check.ranks for run in running)
    return there < 3 * workers and workers > sum(
        run.job.check.ranks for run in running if run.has_a_place
    )


def processes_at_a_time() -> int:
    """Two for each CPU. With one, a third of the CPUs' time is lost: while ranks find each other,
    and until it is seen that a check has ended."""
    return 2 * (os.cpu_count() or 1)


@cache
def prepare() -> None:
    """Import what checks import, for what that imports of torch, which takes seconds; and forget
    minifsdp, and what has imported it."""
    for name in ("minifsdp.sim", "torch._dynamo", "tests.lone_unit"):
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.partition(".")[0] == "minifsdp" or name.startswith("tests."):
            del sys.modules[name]
    gc.collect()
    gc.freeze()  # or each new process would copy all memory when it looks for garbage


def _start(job: Job, patience: float, again: bool = False) -> _Running:
    out = tempfile.TemporaryDirectory(prefix="minifsdp-grade-")
    seconds = job.check.seconds * patience
    sys.stdout.flush()
    sys.stderr.flush()
    with out_of_reach():
        process = os.fork()
        if not process:
            _close_files()
            lead(job, Path(out.name))
    return _Running(job, process, out, seconds, Patience(seconds), again)


def _close_files() -> None:
    """Those of the grader: by one of them the judge could be asked (court.py)."""
    try:
        opened = [int(number) for number in os.listdir("/proc/self/fd")]
    except OSError:
        opened = list(range(256))
    for number in opened:
        if number > 2:
            with suppress(OSError):
                os.close(number)


def _finish(run: _Running, status: int | None) -> Report:
    out = Path(run.out.name)
    if status is None:
        with suppress(ProcessLookupError):
            os.killpg(run.process, signal.SIGKILL)
        os.waitpid(run.process, 0)
    files = [out / f"seen.{rank}" for rank in range(run.job.check.ranks)]
    ended, inconclusive = ("", False) if all(map(Path.exists, files)) else _why(run, out, status)
    ranks = [read_report(f if f.exists() else f.with_suffix(f"{f.suffix}.partly")) for f in files]
    if not ended and None in ranks:  # else nothing would be compared, and nothing found wrong
        ended = "its report cannot be read: does something else write to the grader's files?"
    with suppress(OSError):
        run.out.cleanup()
    return Report(ranks, ended, inconclusive)


def _why(run: _Running, out: Path, status: int | None) -> tuple[str, bool]:
    """Why not all ranks have reported, and whether that is inconclusive."""
    job, limit = run.job, f"was stopped after {run.seconds:.0f} s"
    stacks = [out / f"stack.{rank}" for rank in range(job.check.ranks)]
    stacks = [stack.read_text(errors="replace") if stack.exists() else "" for stack in stacks]
    for rank, stack in enumerate(stacks):
        who = f"rank {rank}" if job.check.ranks > 1 else "the program"
        if at := _line(stack, job.folder):
            return f"{who} {limit}, at {at}: is there a loop or a wait without an end?", False
    for rank in range(job.check.ranks):
        code = out / f"code.{rank}"
        if code.exists() and not (out / f"seen.{rank}").exists():
            who = f"rank {rank}" if job.check.ranks > 1 else "the program"
            how = _exit(int(code.read_text()))
            return f"{who} has ended before the check was over ({how})", False
    if status is None:
        at = [line for stack in stacks if (line := _line(stack, CHECKS))]
        where = f" (the check stands at {at[0]})" if at else ""
        twice = ", twice" * run.again
        return (
            f"it {limit}{twice}, outside of your files{where}: either a rank waits for one that "
            f"never comes, or this machine does too much else"
        ), True
    return "it has ended before the check was over", False


def _exit(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        there = ": it has used memory that is not there" if name in ("SIGSEGV", "SIGBUS") else ""
        return f"killed by {name}{there}"
    return f"exit code {code}; does something call exit()?"


def _line(stack: str, folder: Path | None) -> str:
    """The innermost line in files of ``folder`` in a stack as faulthandler writes it."""
    for file, line, function in re.findall(r'File "(.*?)", line (\d+) in (\S+)', stack):
        if folder is not None and Path(file).parent == folder:
            return f"{Path(file).name}:{line} in {function}"
    return ""


def read_report(path: Path) -> list[Seen] | None:
    """The observations in a file; None if there is none, or if it is not what inside.py writes."""
    try:
        # weights_only: a pickle of a student's making would run code in here otherwise.
        seen = [Seen(*entry) for entry in torch.load(path, weights_only=True)]
        sound = all(what or {*value} == {"raised", "message", "at"} for what, value, *_ in seen)
    except Exception:
        return None
    return seen if sound else None


# ----------------------------------------------------------- what students' processes leave behind


def _adopt_orphans() -> None:
    """A process that leaves its group becomes a child of this one when its parent ends, so that it
    can be found. Otherwise it could overwrite the results after the grader has written them."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _kill_descendants() -> None:
    with suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while found := children.read_text().split():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
                os.waitpid(int(process), 0)

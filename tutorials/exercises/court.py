"""The judge, in a process of its own, which alone knows what is expected.

The processes that run a student's program are forked from the grader. What the grader has in memory
they have too: a program that walks the frames of its callers, or all objects that Python knows,
would find what it is expected to show. So the grader has none of that. It forks this process
first, sends it what was seen, and gets verdicts::

    grader   --- forks --->   the judge: runs the reference, keeps what it gives
    grader   --- forks --->   a student's program, which reports what is seen
    grader   --- report -->   the judge
    grader   <-- verdict ---  the judge
"""

import os
import pickle
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from minifsdp.sim.cli.terminal import AGAIN, out_of_reach
from tutorials.exercises.catalog import Check
from tutorials.exercises.expected import expected_reports
from tutorials.exercises.judge import Verdict, verdict
from tutorials.exercises.sandbox import Report, prepare

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Court:
    """Says whether reports are right, until the end of its ``with``.

    Args:
        checks: whose reports will be judged.
        seed, patience, workers, keep: as in :func:`expected.expected_reports`.
    """

    def __init__(
        self, checks: Iterable[Check], seed: int, patience: float, workers: int, keep: bool
    ) -> None:
        prepare()  # in both processes: once, and not twice
        self._numbers = {check: number for number, check in enumerate(checks)}
        self._judge, judges = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with out_of_reach():
            self._process = os.fork()
            if not self._process:
                self._judge.close()
                _judge(judges, list(self._numbers), (seed, patience, workers, keep))
        judges.close()

    def __enter__(self) -> "Court":
        """When the reference has run: before any program of a student's does."""
        try:
            self._received()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the judge, and what it may be running: after Ctrl-C, nobody waits for it."""
        with suppress(ProcessLookupError, ChildProcessError):  # sandbox.py may have ended it
            os.kill(self._process, signal.SIGTERM)
            os.waitpid(self._process, 0)

    def verdict(self, check: Check, found: Report) -> Verdict:
        """Whether what was seen is right."""
        self._judge.send_bytes(pickle.dumps((self._numbers[check], found)))
        said: Verdict = self._received()
        return said

    def _received(self) -> Any:
        what = pickle.loads(self._judge.recv_bytes())
        if isinstance(what, BaseException):
            raise what
        return what


def _judge(grader: Connection, checks: list[Check], how: tuple[int, float, int, bool]) -> None:
    """Answer until the grader is gone. Does not return."""
    for signal_number in (signal.SIGTERM, signal.SIGALRM):  # so that what it runs is ended, too
        signal.signal(signal_number, lambda *_: sys.exit())
    sys.unraisablehook = _again
    with suppress(EOFError, BrokenPipeError, SystemExit):  # the grader's end is ours
        try:
            expected = expected_reports(checks, *how)
            grader.send_bytes(pickle.dumps(None))
            while True:
                number, found = pickle.loads(grader.recv_bytes())
                said = verdict(checks[number], expected[checks[number]], found)
                grader.send_bytes(pickle.dumps(said))
        except Exception as error:
            grader.send_bytes(pickle.dumps(error))
    os._exit(0)


def _again(what: "UnraisableHookArgs") -> None:
    """What is raised in a callback of a fork is lost. If that was the end, come to it again, for
    somebody waits for it."""
    if issubclass(what.exc_type, SystemExit):
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    else:
        sys.__unraisablehook__(what)

"""Time limits that hold on a busy machine.

A limit in a test is there to end what hangs, not to measure how fast anything is. A fixed number of
seconds does the one on an idle machine only: where ten programs share two cores, what takes ten
seconds takes a minute, and the test fails though nothing hangs. So the seconds that count here are
those that this process would have had on an idle machine: each second of the clock counts for as
much as a short computation gets of its core.
"""

import subprocess
import time
from typing import Any

SAMPLE = 0.02  # seconds of computation that measure how busy the machine is
INTERVAL = 1.0  # seconds of the clock between two such measurements


def share_of_a_core() -> float:
    """How much of a core a process gets that has something to compute: 1.0 on an idle machine."""
    start, computed = time.monotonic(), time.process_time()
    while time.process_time() - computed < SAMPLE:
        pass
    return min((time.process_time() - computed) / (time.monotonic() - start), 1.0)


class Patience:
    """How long to wait for something yet, in seconds of an idle machine.

    ::

        patience = Patience(60)
        while patience.left:
            ...  # wait for something, `patience.turn` seconds of the clock at most
            patience.count()
    """

    def __init__(self, seconds: float) -> None:
        self.left, self._counted = seconds, time.monotonic()

    @property
    def turn(self) -> float:
        """For how long to wait before :meth:`count` is called again."""
        return min(self.left, INTERVAL)

    def count(self) -> None:
        """Take off what has passed since this was called last. Short waits are not measured, for
        measuring takes time itself: they are taken off with the next."""
        passed = time.monotonic() - self._counted
        if passed < min(self.left, INTERVAL):
            return
        # Who calls this waits for a turn at most. If much more has passed, the whole machine has
        # stood still (it was suspended, or moved to another host), and the ranks with it.
        left = self.left - min(passed, 2 * INTERVAL) * share_of_a_core()
        self.left, self._counted = left if left > SAMPLE else 0.0, time.monotonic()

    def at_most(self, seconds: float) -> None:
        """Wait no longer than ``seconds`` from now on."""
        if seconds < self.left:
            self.left, self._counted = seconds, time.monotonic()


def run_command(
    command: list[Any], seconds: float = 100.0, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and keep what it prints.

    Raises:
        subprocess.TimeoutExpired: it has not ended after so many seconds of an idle machine, and
            was killed.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    ) as process:
        output, errors = communicate(process, seconds)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def communicate(process: "subprocess.Popen[str]", seconds: float = 100.0) -> tuple[str, str]:
    """Wait for the end of a program; what it has printed. Raises as :func:`run_command`."""
    patience = Patience(seconds)
    while True:
        try:
            return process.communicate(timeout=patience.turn)
        except subprocess.TimeoutExpired:
            patience.count()
            if not patience.left:
                process.kill()
                raise

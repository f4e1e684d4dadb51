"""Ctrl-C in everything that takes long: one line, status 130, and no process stays."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.patience import Patience, communicate
from tutorials.exercises.catalog import exercises_alone

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "sim": "-m minifsdp sim --model gpt-1.3b --sweep batch=1,2,3,4,5,6,7,8",
    "plan": "-m minifsdp plan --model gpt-1.3b",
    "calibrate": "-m minifsdp calibrate -o {tmp}/cluster.json",
    "demo": "-m minifsdp demo --steps 100000",
    "grade": "-m minifsdp grade {tmp}/mine",
    "kit-check": "-m tutorials.exercises.kit_check",
    "lab": "-m tutorials.exercises.lab tutorials/exercises",
    "mutants": "-m tests.mutants core/limiter",
    "fuzz": "-m tests.fuzz 1000000",
    "matrix": "-m tests.matrix",
    "claims": "-m tests.claims",
    "predictions": "-m tests.predictions",
    "scale": "-m tests.scale",
}

# Seconds of CPU time, and whether one process alone gets it. While torch is being imported (1)
# there is only one; when it works (6), there may be more.
WHEN = [(1.0, True), (6.0, True), (6.0, False)]


def started(mark):
    """What still runs of all that a command has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def computed(mark):
    """Seconds of CPU time, of all that a command has started: on a busy machine, too, they say how
    far it has come."""
    ticks = 0
    for pid in started(mark):
        with suppress(OSError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(("seconds", "alone"), WHEN)
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line_and_nothing_stays(name, seconds, alone, tmp_path):
    """A terminal sends it to all processes of a command, `kill` and a notebook to the first, which
    is then ``alone``."""
    (tmp_path / "mine").mkdir()
    for exercise in exercises_alone(2):
        (tmp_path / "mine" / exercise.file).write_text(exercise.reference)
    mark = f"MARK={uuid.uuid4().hex}"
    environment = {**os.environ, "MARK": mark.partition("=")[2], "TMPDIR": str(tmp_path)}
    words = COMMANDS[name].format(tmp=tmp_path).split()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        while computed(mark) < seconds and process.poll() is None:
            time.sleep(0.1)
        (os.kill if alone else os.killpg)(process.pid, signal.SIGINT)
        _, errors = communicate(process)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors and errors.count("stopped") == 1, errors
        patience = Patience(0.5)  # a process that is killed takes a moment
        while patience.left and started(mark):
            time.sleep(0.1)
            patience.count()
        assert not started(mark)
    finally:
        for pid in started(mark):
            os.kill(pid, signal.SIGKILL)

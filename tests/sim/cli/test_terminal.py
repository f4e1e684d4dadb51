"""sim/cli/terminal.py: Ctrl-C, progress and colours."""

import os
import signal
import subprocess
import sys
import time

import pytest

from minifsdp.sim.cli import terminal
from minifsdp.sim.cli.terminal import columns, out_of_reach, painted, progress
from tests.patience import run_command

INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\n"


def use_a_terminal(monkeypatch):
    """Both streams are one, of 40 columns."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)


def program(text, **environment):
    """What comes of a program that has begun as ours do."""
    text = f"from minifsdp.sim.cli.terminal import *\nbegin()\n{text}"
    environment = {**os.environ, **environment}
    return run_command([sys.executable, "-c", text], seconds=60, env=environment)


def test_progress_goes_over_the_last_line_of_a_terminal(capsys, monkeypatch):
    use_a_terminal(monkeypatch)
    progress("step 1")
    progress("step 2, of which there is more to say than fits")
    progress("")
    first, second, wiped = capsys.readouterr().err.split("\r")[1:]
    assert (first, wiped) == ("step 1 ...\x1b[K", "\x1b[K")
    assert len(second.removesuffix("\x1b[K")) == 39  # it would not go back from another line


def test_where_it_goes_to_a_file_there_is_a_line_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    progress("")
    for step in range(31):
        progress(f"step {step}")
        now[0] += 1.0
    assert capsys.readouterr() == ("", "step 11\nstep 22\n")
    progress("")  # what is short says nothing, however long ago the last one was
    now[0] += 100.0
    progress("step 0")
    progress("")
    assert capsys.readouterr() == ("", "")


def test_colours_are_for_terminals_that_want_them(capsys, monkeypatch):
    use_a_terminal(monkeypatch)
    assert painted("right", "green") == "\x1b[32mright\x1b[0m" and painted("", "red") == ""
    for name, value in {"NO_COLOR": "1", "TERM": "dumb"}.items():
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert painted("right", "green") == "right"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert painted("right", "green") == "right"


def test_what_goes_to_a_file_is_as_wide_as_ever(capsys, monkeypatch):
    use_a_terminal(monkeypatch)
    assert columns(otherwise=110) == 40
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert columns(otherwise=110) == 110


STOPPED = {
    "in the middle": "end_tidily()\n" + INTERRUPT + "time.sleep(60)",
    "in a finalizer": "end_tidily()\nclass It:\n    def __del__(self):\n"
    f"        exec({INTERRUPT!r})\n"
    "        time.sleep(0.1)\nimport time\nit = It()\ndel it\ntime.sleep(60)",
    "where it is taken for another error": "end_tidily()\nimport time\ntry:\n"
    f"    exec({INTERRUPT!r})\n"
    "    time.sleep(60)\nexcept BaseException:\n    pass\ntime.sleep(60)",
    "at once, whoever catches it": f"try:\n    exec({INTERRUPT!r})\n"
    "    time.sleep(60)\nexcept BaseException:\n    print('caught')",
    "with a child that takes no notice": "end_tidily()\nimport multiprocessing, time\n"
    "with out_of_reach():\n"
    "    multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()\n"
    + INTERRUPT
    + "time.sleep(60)",
}


@pytest.mark.parametrize("text", STOPPED.values(), ids=STOPPED)
def test_ctrl_c_is_one_line_and_130(text):
    start = time.monotonic()
    done = program(text)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    assert time.monotonic() - start < 50  # nobody has waited for anything


def test_what_is_to_be_done_in_the_end_is_done():
    done = program(
        "end_tidily()\nimport atexit\natexit.register(print, 'atexit')\n"
        f"try:\n    exec({INTERRUPT!r})\n    time.sleep(60)\n"
        "finally:\n    time.sleep(1)\n    print('finally')"  # for longer than AGAIN
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "finally\natexit\n", "stopped\n")


def test_an_error_that_came_of_it_is_an_error():
    """Of exit status 1: no timer goes off when Python has forgotten what to do with it."""
    done = program(
        "end_tidily()\nimport os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\nexcept BaseException:\n    pass\nraise ImportError('numpy')"
    )
    assert done.returncode == 1 and "ImportError: numpy" in done.stderr


def test_a_rank_leaves_it_to_its_launcher():
    done = program(INTERRUPT + "time.sleep(60)", RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_other_errors_are_shown_as_ever():
    done = program("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr
    done = program("class It:\n    def __del__(self):\n        1 / 0\nIt()")
    assert done.returncode == 0 and "ZeroDivisionError" in done.stderr


def test_what_is_out_of_reach_goes_on_and_its_parent_does_not():
    sleeps = "import time; time.sleep(0.5); print('slept')"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with out_of_reach():
        child = subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    child.send_signal(signal.SIGINT)
    assert child.communicate()[0] == b"slept\n" and child.returncode == 0
    done = program(
        "end_tidily()\nimport os, signal\nwith out_of_reach():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    print('over')\nprint('not here')"
    )
    assert (done.returncode, done.stdout) == (130, "over\n")


def test_nobody_is_told_that_numpy_is_missing(monkeypatch):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    warn = "import warnings; warnings.warn('Failed to initialize NumPy: No module named numpy')"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {warn!r}])"
    assert "Failed" in run_command([sys.executable, "-c", warn]).stderr
    for text in (warn, child):
        assert program(text).stderr == ""


def test_pytest_keeps_its_own_ways():
    before = sys.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGINT)
    terminal.begin(program=False)
    assert (sys.excepthook, sys.unraisablehook, signal.getsignal(signal.SIGINT)) == before


def test_what_was_typed_is_the_name_of_a_program(monkeypatch):
    monkeypatch.delenv("MINIFSDP_TYPED", raising=False)
    assert terminal.typed() is None
    monkeypatch.setenv("MINIFSDP_TYPED", "make grade")
    assert terminal.typed() == "make grade"

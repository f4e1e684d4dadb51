"""The process that judges: that it ends when it is told to."""

import sys
from pathlib import Path

from tests.patience import run_command

PROGRAM = """
import os, signal
from tutorials.exercises.catalog import exercises
from tutorials.exercises.court import Court

grader, told = os.getpid(), []

def tell():
    if os.getpid() != grader and not told:
        told.append(True)
        os.kill(os.getpid(), signal.SIGTERM)

def noted(process, options, wait=os.waitpid):
    ended, status = wait(process, options)
    if os.getpid() == grader:
        print("status", status)
    return ended, status

os.register_at_fork(before=tell)
os.waitpid = noted
try:
    with Court(exercises()["limiter.1"].checks, 0, 1.0, 1, False) as court:
        court._judge.recv_bytes()  # it may have come to its first answer, and says nothing more
except EOFError:
    print("it has ended")
"""


def test_an_end_that_comes_while_the_judge_forks_is_not_lost():
    """Python drops what is raised in a callback of a fork. A grader that was interrupted then
    waited for its judge without an end. Status 0: it was not killed, but has ended what it ran."""
    ran = run_command([sys.executable, "-c", PROGRAM], 20, cwd=Path(__file__).parents[2])
    assert (ran.stdout, ran.stderr) == ("status 0\nit has ended\n", "")

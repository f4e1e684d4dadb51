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

os.register_at_fork(before=tell)
try:
    with Court(exercises()["limiter.1"].checks, 0, 1.0, 1, False):
        print("it judges")
except EOFError:
    print("it has ended")
"""


def test_an_end_that_comes_while_the_judge_forks_is_not_lost():
    """Python drops what is raised in a callback of a fork. A grader that was interrupted then
    waited for its judge without an end."""
    ran = run_command([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2])
    assert (ran.stdout, ran.stderr) == ("it has ended\n", "")

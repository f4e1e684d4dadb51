"""tutorials/exercises/mistakes.py: what a puzzle shows. `make kit-check` looks at all of them.

It runs in a process of its own: the grader forks, and may not have imported minifsdp before.
"""

import sys
from pathlib import Path

import pytest

from tests.patience import run_command

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_ranks_that_part_ways_are_shown_and_no_error_of_the_wrong_line_itself(tmp_path):
    program = [sys.executable, "-W", "ignore", "-m", "tutorials.exercises.mistakes"]
    done = run_command([*program, "7", str(tmp_path), "--anyway"], seconds=600, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "wait for each other in different places" in done.stdout
    assert "has no attribute" not in done.stdout

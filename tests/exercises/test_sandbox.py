"""tutorials/exercises/sandbox.py: what is ended, and what is said of it.

The grader forks, so it runs in a process of its own.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.patience import run_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import json, sys, time
from pathlib import Path

import torch.distributed as dist

from tests import patience
from tutorials.exercises.catalog import Check
from tutorials.exercises.inside import Job
from tutorials.exercises.judge import verdict
from tutorials.exercises.sandbox import run_all

folder = Path(sys.argv[1])

def attempts(name):
    with (folder / name).open("a") as file:
        file.write("x")
    return (folder / name).stat().st_size

def hangs():
    yield "attempt", attempts("hangs")
    time.sleep(1000)

def hangs_once():
    if attempts("hangs once") == 1:
        time.sleep(1000)
    yield "a number", 1

def waits_for_the_other():
    yield "a number", 1
    if dist.get_rank():
        dist.barrier()
    time.sleep(1000)

def slow():
    time.sleep(1.5)
    yield "a number", 1

def quick():
    yield "a number", 1

def in_their_order(*functions):
    # The names of checks, as they end, with one place.
    checks = [Check(function, 1, 5, lambda what, want, got: None) for function in functions]
    reports = run_all([Job(check, {}, None, 0) for check in checks], 1)
    return [job.check.function.__name__ for job, report in reports]

def looked(function, seconds, ranks=1):
    check = Check(function, ranks, seconds, lambda what, want, got: None)
    ((_, report),) = run_all([Job(check, {}, None, 0)], 2)
    return [report.ended, report.inconclusive, *verdict(check, report._replace(ended="", 
        inconclusive=False), report)]

def busy(function, seconds):
    patience.INTERVAL, patience.share_of_a_core = 0.1, lambda: 0.01
    try:
        return looked(function, seconds)
    finally:
        patience.INTERVAL, patience.share_of_a_core = 1.0, share
share = patience.share_of_a_core

print(json.dumps({
    "hangs": looked(hangs, 1),
    "attempts": attempts("hangs") - 1,
    "hangs once": looked(hangs_once, 1),
    "waits": looked(waits_for_the_other, 1, ranks=2),
    "on a busy machine": busy(slow, 0.5),
    "in their order": in_their_order(hangs, quick),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sandbox")
    done = run_command([sys.executable, "-W", "ignore", "-c", PROGRAM, folder], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_ends_twice_outside_of_the_students_files_is_inconclusive(found):
    ended, inconclusive, state, message = found["hangs"]
    assert "was stopped after 1 s, twice, outside of your files" in ended
    assert inconclusive and (state, message) == ("inconclusive", ended)
    assert found["attempts"] == 2


def test_what_comes_to_its_end_the_second_time_is_right(found):
    assert found["hangs once"] == ["", False, "right", ""]


def test_no_timeout_of_gloos_makes_a_rank_fail_that_waits(found):
    assert found["waits"][1:3] == [True, "inconclusive"]


def test_on_a_busy_machine_limits_come_later(found):
    assert found["on a busy machine"] == ["", False, "right", ""]


def test_what_hangs_keeps_others_waiting_for_a_moment_only(found):
    assert found["in their order"] == ["quick", "hangs"]

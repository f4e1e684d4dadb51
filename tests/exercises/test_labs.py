"""tutorials/exercises/labs: what is said of broken files. `make kit-check` measures the labs.

Each runs in a process of its own: the grader forks, and may not have imported minifsdp before.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.patience import run_command

ROOT = Path(__file__).parent.parent.parent
LABS = ROOT / "tutorials/exercises/labs"
KEYS = sorted(path.name for path in (LABS / "solutions").iterdir() if path.is_dir())


def run(program, *arguments):
    """What a program like make's prints."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = run_command(command, seconds=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_lab_says_what_is_wrong_with_a_broken_file(tmp_path):
    folder = tmp_path / "labs" / "two_ahead"
    folder.mkdir(parents=True)
    (folder / "prefetch.py").write_text("raise NotImplementedError('look ahead')\n")
    command = [sys.executable, "-W", "ignore", "-m", "tutorials.exercises.lab", str(tmp_path)]
    done = run_command(command, seconds=600, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert "prefetch.py:1: NotImplementedError: look ahead" in done.stdout
    assert "bytes_limiter" not in done.stdout  # there is no file of it


def test_every_lab_has_a_folder_a_solution_and_a_page():
    program = """
import json
from tests.patience import run_command
from tutorials.exercises.lab import labs
print(json.dumps([[lab.key, lab.page, list(lab.files)] for lab in labs().values()]))
"""
    found = json.loads(run(program).splitlines()[-1])
    assert sorted(key for key, _, _ in found) == KEYS
    for key, page, files in found:
        assert (ROOT / f"tutorials/{page}.md").exists(), key
        for name in files:
            assert (ROOT / f"minifsdp/{name}.py").exists(), key
        names = sorted(f"{Path(name).name}.py" for name in files)
        for folder in (LABS / key, LABS / "solutions" / key):
            assert sorted(path.name for path in folder.glob("*.py")) == names, folder


@pytest.mark.slow
def test_where_the_default_engine_was_stopped_nobody_knows():
    program = """
from tutorials.exercises.lab import _outcome, labs, show
from tutorials.exercises.sandbox import Report
lab, *_ = labs().values()
stopped = {check: Report([None] * check.ranks, "it was stopped", True) for check in lab.checks}
outcome = _outcome(lab, stopped, stopped, None)
print(outcome.inconclusive, outcome.better, outcome.reached)
print(show(outcome))
"""
    first, *_, last = run(program).splitlines()
    assert first == "True False False"
    assert last == "  ? inconclusive, run again: of the reference, it was stopped"


def test_what_a_crash_interrupts_is_not_its_likely_cause():
    program = """
from tutorials.exercises.labs.measure import because
error = {"raised": "ValueError", "message": "no such rank", "at": "collectives.py:1"}
print(because("races", [], error))
"""
    assert run(program) == "None\n"

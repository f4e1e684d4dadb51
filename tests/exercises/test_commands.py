"""tutorials/exercises: student, grade and hint, as a user types them."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.patience import run_command
from tutorials.exercises.catalog import exercises
from tutorials.exercises.hint import names
from tutorials.exercises.student import make

FIRST = next(e for e in exercises().values() if e.key == "shard.1")


def command(name, *words, **environment):
    module = ["-W", "ignore", "-m", f"tutorials.exercises.{name}"]
    environment = {**os.environ, **environment}
    return run_command([sys.executable, *module, *words], seconds=300, env=environment)


def test_a_hint_without_an_exercise_lists_them():
    done = command("hint", "", "1")  # as make calls it
    assert done.returncode == 0 and done.stderr == ""
    assert "make hint EX=limiter.1" in done.stdout and "limiter.1 to 3, " in done.stdout
    assert len(done.stdout.splitlines()) <= 10
    for exercise in exercises().values():
        assert exercise.key.partition(".")[0] in names()


@pytest.mark.parametrize("place, problem", [
    ("file", "it is a file"), ("file/below", "{tmp}/file is a file"),
])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_one_line(place, problem, tmp_path):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / place
    with pytest.raises(SystemExit) as end:
        make(folder)
    assert end.value.code == f"{folder} cannot be made: {problem.format(tmp=tmp_path)}"
    with pytest.raises(SystemExit, match=r"/proc/mine cannot be made: no such file or directory"):
        make(Path("/proc/mine"))
    assert (tmp_path / "file").read_text() == "mine"


def test_results_that_cannot_be_written_are_noticed_before_anything_runs(tmp_path):
    (tmp_path / FIRST.file).write_text(FIRST.reference)
    done = command("grade", str(tmp_path), "--results", "/dev/full")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "--results: cannot write '/dev/full': no space left on device\n"


@pytest.mark.slow
def test_grades_as_a_document(tmp_path):
    (tmp_path / FIRST.file).write_text(FIRST.reference)
    done = command("grade", str(tmp_path), "--exercise", "shard", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and [r["exercise"] for r in found["results"]] == [
        "shard.1",
        "shard.2",
    ]
    assert found["tracks"]["2"] == {"points": 4, "of": 4}

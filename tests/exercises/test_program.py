"""tutorials/exercises: track one, a program of the student's own that grows."""

import ast
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.patience import run_command
from tutorials import grow
from tutorials.exercises import source
from tutorials.exercises.catalog import exercises
from tutorials.exercises.grade import _before_running, _graded_as, begun, choose
from tutorials.exercises.report import Result, table
from tutorials.exercises.student import make

ROOT = Path(__file__).parent.parent.parent
TRACK_ONE = [exercise for exercise in exercises().values() if exercise.track == 1]
STEPS = [exercise for exercise in TRACK_ONE if exercise.needs]


def folder_with(path, text):
    path.mkdir()
    (path / "fsdp.py").write_text(text)
    return path


def graded(cases):
    """The state and the message of each, from a process like make's."""
    program = f"""
import json
from pathlib import Path
from tutorials.exercises.catalog import exercises
from tutorials.exercises.grade import grade_all
cases = [(Path(f), exercises()[k]) for f, k in {[(str(f), key) for f, key in cases]}]
found = grade_all(cases, workers=2, keep=False)
print(json.dumps([(r.exercise.key, r.state, r.message) for r in found]))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_command(command, seconds=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


BEGIN = "2_cuda"  # what a new file is made of
PROGRAMS = [BEGIN, *(step.program for step in STEPS)]


def test_each_exercise_leads_from_one_program_to_a_later_one_and_none_is_left_out():
    assert all(exercise.program == BEGIN for exercise in TRACK_ONE if not exercise.needs)
    places = [grow.NAMES.index(program) for program in PROGRAMS]
    assert all(0 < after - before <= 3 for before, after in pairwise(places))
    assert PROGRAMS[-1] == grow.NAMES[-1]
    assert [step.page for step in STEPS] == [grow.page(step.program) for step in STEPS]
    assert all(step.takes_all for step in STEPS)


def test_a_new_file_has_docstrings_and_what_each_function_needs(tmp_path):
    make(tmp_path / "mine")
    text = (tmp_path / "mine" / "fsdp.py").read_text()
    wanted = source.definitions(ast.parse(grow.text(BEGIN)))
    given = source.definitions(ast.parse(text))
    assert given.keys() == wanted.keys()
    assert all(ast.get_docstring(given[name]) == ast.get_docstring(wanted[name]) for name in wanted)
    assert text.count("# You need: ") == sum(len(exercise.calls) for exercise in TRACK_ONE) > 5
    assert max(map(len, text.splitlines())) <= 100
    assert "resize_" not in text.partition("class Unit")[2].replace("resize_(bytes)", "")
    for exercise in TRACK_ONE:
        state, message = _before_running(exercise, tmp_path / "mine")[1:]
        assert state == "to do" and exercise.key in message


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.key)
def test_a_step_is_to_do_until_the_file_has_what_it_is_about(step, tmp_path):
    before = PROGRAMS[PROGRAMS.index(step.program) - 1]
    state, message = _before_running(step, folder_with(tmp_path / "before", grow.text(before)))[1:]
    assert state == "to do" and all(name in message for name in step.needs)
    for name in grow.NAMES[grow.NAMES.index(step.program) :]:
        assert not source.lacks(step, folder_with(tmp_path / name, grow.text(name)) / "fsdp.py")


def test_when_the_file_has_grown_its_functions_are_graded_together(tmp_path):
    first, *_ = TRACK_ONE
    for name in grow.NAMES[1:]:
        found = _graded_as(first, folder_with(tmp_path / name, grow.text(name)))
        assert found.key == ("build.1" if name in ("1_streams", BEGIN) else "build.8")
    broken = folder_with(tmp_path / "broken", "def broken(:")
    assert _graded_as(first, broken) is first
    assert "fsdp.py:1" in _before_running(first, broken).message


def test_a_track_is_chosen_or_begun(tmp_path, capsys):
    assert [exercise.track for exercise in choose("", 1)] == [1] * len(TRACK_ONE)
    assert choose("build.1") == choose("build.1", 1) == TRACK_ONE[:1]
    with pytest.raises(SystemExit, match=r"^2$"):  # make forgives 1: something is not right yet
        choose("build.1", 2)
    assert "there is no exercise 'build.1'; there are: flat" in capsys.readouterr().err
    make(tmp_path / "mine")

    def tracks():
        return {exercise.track for exercise in begun(choose(""), tmp_path / "mine")}

    assert tracks() == {1}
    (tmp_path / "mine" / "shard.py").write_text((ROOT / "minifsdp/core/shard.py").read_text())
    assert tracks() == {2}
    (tmp_path / "mine" / "fsdp.py").write_text(grow.text(BEGIN))
    assert tracks() == {1, 2}


def test_each_track_has_its_sum():
    every = exercises()
    results = [Result(every["build.1"], "right"), Result(every["flatten.1"], "to do")]
    lines = table(results).splitlines()
    assert lines[1].split() == ["5/5", "points,", "track", "1"]
    assert lines[3].split() == ["0/2", "points,", "track", "2"]


LAST = grow.text(grow.NAMES[-1])
WRONG = grow.text(BEGIN).replace("grad / unit.world", "grad")


@pytest.mark.slow
def test_right_wrong_and_to_do(tmp_path):
    wrong = folder_with(tmp_path / "wrong", WRONG)
    last = folder_with(tmp_path / "last", LAST)
    cases = [(wrong, "build.6"), (wrong, "build.1"), (wrong, "build.8"), (wrong, "grow.1")]
    cases += [(last, "build.1"), (last, "build.8"), (last, "grow.3")]
    found = graded(cases)
    assert [key for key, *_ in found] == [key for _, key in cases]
    states = [state for _, state, _ in found]
    assert states == ["wrong", "right", "wrong", "to do", "right", "right", "right"]
    assert "exactly 2 x too large" in found[0][2]
    grown = LAST.replace("self.sent.div_(unit.world)", "pass")
    ((_, state, message),) = graded([(folder_with(tmp_path / "grown", grown), "build.6")])
    assert state == "wrong" and message.startswith("graded with the whole file, which has grown")


@pytest.mark.slow
def test_what_is_expected_comes_without_the_students_file(tmp_path):
    trick = """
import tutorials.grow
from tutorials.exercises import observe
tutorials.grow.load = lambda name: __import__("fsdp")
"""
    dishonest = LAST.replace("self.sent.div_(unit.world)", "pass") + trick
    missing = "import missing_module\n" + LAST
    cases = [(folder_with(tmp_path / "trick", dishonest), "grow.13")]
    cases += [(folder_with(tmp_path / "missing", missing), "grow.5")]
    (_, state, _), (_, second, message) = graded(cases)
    assert state == second == "wrong"
    assert "fsdp.py:1: ModuleNotFoundError" in message

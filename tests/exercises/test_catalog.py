"""tutorials/exercises: what is written about the exercises is so. `make kit-check` has the rest."""

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.patience import run_command
from tutorials.exercises import source
from tutorials.exercises.catalog import exercises, exercises_alone, wrong_solutions
from tutorials.exercises.context import context
from tutorials.exercises.mistakes import mistakes, unwritten
from tutorials.exercises.student import make

ROOT = Path(__file__).parent.parent.parent


def test_there_are_100_points_in_each_track_and_enough_wrong_solutions():
    for track in (1, 2):
        assert sum(e.points for e in exercises().values() if e.track == track) == 100
    assert len(wrong_solutions()) >= 160
    assert len(list((ROOT / "tutorials/exercises/right").glob("*.py"))) >= 20


def test_the_readme_counts_them():
    (number,) = re.findall(r"[Aa] course of (\d+) exercises", (ROOT / "README.md").read_text())
    assert int(number) == len(exercises())


def test_pages_and_the_path_name_their_exercises():
    path = (ROOT / "tutorials/README.md").read_text()
    for exercise in exercises().values():
        (row,) = (line for line in path.splitlines() if f"]({exercise.page}.md)**" in line)
        assert f"`{exercise.key}`" in row, exercise.key
        page = (ROOT / f"tutorials/{exercise.page}.md").read_text()
        _, _, foot = page.partition("<!-- end of page -->")
        assert f"`{exercise.key}` ({exercise.title})" in foot, exercise.key


def test_a_students_folder_has_docstrings_and_no_solutions(tmp_path):
    make(tmp_path / "mine")
    for exercise in exercises_alone():
        text = (tmp_path / "mine" / exercise.file).read_text()
        assert exercise.todo in text or exercise.key == "limiter.3", exercise.key
        for name in exercise.hides:
            assert f"def {name.rpartition('.')[2]}(" not in text, name
    with pytest.raises(SystemExit, match=r"has fsdp\.py, flatten\.py"):
        make(tmp_path / "mine")  # what is there may be work


def test_the_last_hint_leaves_something_to_decide():
    """A question is left, and no whole body of a function is in it."""
    assert [key for key, exercise in exercises().items() if "?" not in exercise.hints[2]] == []
    for exercise in exercises_alone():
        tree = ast.parse(exercise.reference)
        for node in source.functions(exercise, source.definitions(tree)).values():
            body = node.body[ast.get_docstring(node) is not None :]
            lines = [ast.unparse(statement) for statement in body] or [exercise.todo]
            said = [line in exercise.hints[2] for line in lines]
            assert not all(said), (exercise.key, node.name)


@pytest.mark.slow
def test_hints_come_one_after_the_other():
    def hint(*words):
        command = [sys.executable, "-W", "ignore", "-m", "tutorials.exercises.hint", *words]
        return run_command(command, cwd=ROOT)

    first = exercises()["limiter.1"].hints
    for number in (1, 2, 3):
        assert first[number - 1] in hint("limiter.1", str(number)).stdout
    assert "there is no exercise 'limiter.9'" in hint("limiter.9").stderr


def test_the_context_has_what_solutions_call_and_not_the_solutions():
    parts = dict(re.findall(r"^## (\S+): .*?\n\n(.*?)(?=\n## |\Z)", context(), re.M | re.S))
    assert parts.keys() == {exercise.key for exercise in exercises_alone(2)}
    assert "`Stream.submit(launch, label)`, core/streams.py: Run" in parts["unshard.1"]
    assert "`place(" not in parts["collectives.2"]  # a name of its own there
    assert "`reshard(" not in parts["reshard.1"] and "Nothing but torch." in parts["flatten.1"]
    assert "`Unit.is_limited`, core/unit.py" in parts["limiter.2"]  # a property is not called
    assert "Parameters.unshard" not in parts["offload.1"]  # streams.unshard is a stream
    assert "Form.join" not in parts["groups.2"] and "_groups(" not in parts["clip_grad.1"]
    for key, part in parts.items():
        for name in exercises()[key].takes:
            assert f"`{name}(" not in part, (key, name)


def test_a_mistake_does_not_hand_out_what_is_still_to_be_written(tmp_path):
    make(tmp_path / "mine")
    mistake = next(m for m in mistakes().values() if m.module == "core/limiter")
    assert unwritten(mistake, tmp_path / "mine") == ["limiter.1", "limiter.2", "limiter.3"]
    assert unwritten(mistake, tmp_path) == ["limiter.1", "limiter.2", "limiter.3"]
    reference = exercises()["limiter.1"].reference
    (tmp_path / "mine" / "limiter.py").write_text(reference)
    assert unwritten(mistake, tmp_path / "mine") == []

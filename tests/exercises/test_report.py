"""tutorials/exercises/report.py: points that are neither given nor lost are told."""

import json
import sys

import pytest

from tutorials.exercises.catalog import exercises, exercises_alone
from tutorials.exercises.report import (
    Result,
    as_json,
    gradescope,
    in_colour,
    inconclusive,
    newest,
    table,
    what_next,
    write,
)

FIRST, SECOND, *_ = exercises_alone()
RESULTS = [Result(FIRST, "inconclusive", "it was stopped"), Result(SECOND, "right")]


def test_the_table_says_what_is_inconclusive_and_to_run_it_again():
    lines = table(RESULTS).splitlines()
    assert lines[0].startswith(f"? {FIRST.key}") and f" 0/{FIRST.points}" in lines[0]
    assert lines[1].strip() == "Inconclusive, run again: it was stopped"
    assert any(line.startswith(f"Inconclusive: {FIRST.key}. ") for line in lines)
    assert "Inconclusive" not in table(RESULTS[1:])


def test_so_does_gradescopes_file(tmp_path):
    assert inconclusive(RESULTS) == [FIRST.key]
    write(tmp_path / "results.json", gradescope(RESULTS), inconclusive(RESULTS))
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["score"] == SECOND.points
    assert found["tests"][0]["output"] == "Inconclusive, run again: it was stopped"
    assert f"Inconclusive: {FIRST.key}. " in found["output"] and "Run again." in found["output"]
    assert found["extra_data"] == {"inconclusive": [FIRST.key]}
    write(tmp_path / "results.json", gradescope(RESULTS[1:]))
    assert json.loads((tmp_path / "results.json").read_text()).keys() == {"score", "tests"}


def test_lines_that_come_one_by_one_are_those_of_the_table():
    """Of both tracks, each with its sum after its last exercise."""
    states = ["right", "wrong", "to do"]
    results = [
        Result(exercise, states[i % 3], "because " * 30)
        for i, exercise in enumerate(exercises().values())
    ]
    chosen = [result.exercise for result in results]
    printed = [line for i in range(len(results)) for line in newest(chosen, results[: i + 1])]
    assert "\n".join([*printed, *what_next(results)]) == table(results)
    sums = [i for i, line in enumerate(printed) if " points, track " in line]
    assert len(sums) == 2 and sums[1] == len(printed) - 1
    assert "track 1" in printed[sums[0]] and "track 2" in printed[sums[1]]


def test_what_is_graded_last_says_what_comes_before_it():
    last, missing = exercises()["together.1"], "when all others are done; not yet: shard.1, hooks.1"
    said = what_next([Result(last, "to do", missing)])
    assert said[1] == f"together.1 is graded {missing}."


@pytest.mark.parametrize("width", [40, 96])
def test_what_is_wrong_is_folded_to_the_width_of_the_terminal(width):
    first, *said = newest([FIRST], [Result(FIRST, "wrong", "because " * 30)], width)[:-1]
    assert first.startswith(f"✗ {FIRST.key}") and len(said) > 1
    assert width - 5 < max(map(len, said)) <= width + 5


def test_signs_and_what_is_said_of_them_have_colours_in_a_terminal(capsys, monkeypatch):
    lines = ["✓ shard.1  right", "✗ shard.2  wrong", "     because"]
    assert [*map(in_colour, lines)] == lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert [*map(in_colour, lines)] == [
        "\x1b[32m✓\x1b[0m shard.1  right",
        "\x1b[31m✗\x1b[0m shard.2  wrong",
        "\x1b[90m     because\x1b[0m",
    ]


def test_a_program_gets_the_same():
    found = json.loads(as_json([*RESULTS, Result(FIRST, "wrong", "because")]))
    right = {"exercise": SECOND.key, "title": SECOND.title, "track": SECOND.track}
    right |= {"state": "right", "points": SECOND.points, "of": SECOND.points, "message": ""}
    assert found["results"][1] == right
    assert [result["points"] for result in found["results"]] == [0, SECOND.points, 0]
    (track,) = found["tracks"].values()
    assert track == {"points": SECOND.points, "of": 2 * FIRST.points + SECOND.points}

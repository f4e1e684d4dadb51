"""tutorials/exercises/report.py: points that are neither given nor lost are told."""

import json

from tutorials.exercises.catalog import exercises_alone
from tutorials.exercises.report import Result, gradescope, inconclusive, table, write

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

"""tutorials/exercises/running.py: what runs next; and grade.py: results are told as they come."""

from pathlib import Path

import pytest

from tutorials.exercises import grade
from tutorials.exercises.catalog import exercises
from tutorials.exercises.judge import Verdict
from tutorials.exercises.report import Result
from tutorials.exercises.running import Running, next_jobs
from tutorials.exercises.sandbox import Report

SEVERAL = [e for e in exercises().values() if len(e.checks) > 1 and not e.takes_all][:3]
RIGHT, WRONG = Verdict("right"), Verdict("wrong", "because")


@pytest.fixture
def running():
    return [Running((Path(), exercise), 0) for exercise in SEVERAL]


def test_each_exercise_gets_one_check_at_a_time_and_the_first_ones_come_first(running):
    of_job = {}
    jobs = next_jobs(running, of_job)
    assert [of_job[next(jobs)] for _ in running] == running
    first, second = running[0], running[1]
    second.note(SEVERAL[1].checks[0], RIGHT)
    assert of_job[next(jobs)] is second  # nothing else of it runs
    assert of_job[next(jobs)] is first  # of all of them something runs
    first.note(SEVERAL[0].checks[0], WRONG)
    assert not first.is_over  # its second check runs
    first.note(SEVERAL[0].checks[1], RIGHT)
    assert first.is_over and first.result == Result(SEVERAL[0], "wrong", "because")


def test_what_is_wrong_is_not_looked_at_any_further(running):
    jobs = next_jobs(running[:1], {})
    assert next(jobs).check is SEVERAL[0].checks[0]
    running[0].note(SEVERAL[0].checks[0], WRONG)
    assert next(jobs, None) is None


def test_wrong_counts_for_more_than_inconclusive(running):
    running[0].note(SEVERAL[0].checks[0], Verdict("inconclusive", "slow"))
    assert running[0].result.state == "inconclusive"
    running[0].note(SEVERAL[0].checks[1], WRONG)
    assert running[0].result.state == "wrong"


class Judge:
    """Finds everything right, whoever asks."""

    def __init__(self, *how):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def verdict(self, check, report):
        return RIGHT


@pytest.fixture
def ended(monkeypatch):
    """The checks that have run so far; they end in the order in which they are begun, but the first
    one ends after two others."""
    checks = []

    def run_all(jobs, workers, patience):
        held = next(jobs)
        for number, job in enumerate(jobs):
            checks.append(job.check)
            yield job, Report([], "")
            if number == 1:
                checks.append(held.check)
                yield held, Report([], "")

    monkeypatch.setattr(grade, "run_all", run_all)
    monkeypatch.setattr(grade, "Court", Judge)
    monkeypatch.setattr(
        grade, "_before_running", lambda exercise, folder: Result(exercise, "right")
    )
    return checks


def test_results_are_told_in_order_and_as_soon_as_they_are_known(ended):
    chosen = [e for e in exercises().values() if e.track == 2 and not e.takes_all][:5]
    came = []
    for result in grade.one_by_one([(Path(), exercise) for exercise in chosen]):
        came.append((result, len(ended)))
    assert [result for result, _ in came] == [Result(exercise, "right") for exercise in chosen]
    assert came[0][1] == 3  # when it has ended, and not before those that have ended earlier
    assert came[0][1] < came[-1][1] == sum(len(exercise.checks) for exercise in chosen)


def test_where_the_graders_files_change_no_result_counts(ended, monkeypatch):
    prints = iter(["before", "after"] * 2)
    monkeypatch.setattr(grade, "fingerprint", lambda: next(prints))
    cases = [(Path(), exercise) for exercise in SEVERAL]
    told = []
    with pytest.raises(grade.FilesChanged):
        told.extend(grade.one_by_one(cases))
    assert {result.state for result in grade.grade_all(cases)} == {"wrong"}

"""Exercises while their checks run: what to run next, and what is known so far."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutorials.exercises.at_fault import file_at_fault
from tutorials.exercises.catalog import Check, Exercise, exercises_alone
from tutorials.exercises.inside import Job
from tutorials.exercises.judge import Verdict
from tutorials.exercises.overlay import layers_for
from tutorials.exercises.report import Result


class Running:
    """An exercise of a folder.

    Args:
        case: the folder, and the exercise.
        seed: of the random numbers in its checks.

    Attributes:
        left: what has not been begun, in the order of the checks.
        at_work: how many checks run now.
    """

    def __init__(self, case: tuple[Path, Exercise], seed: int) -> None:
        self.case, self.at_work = case, 0
        folder, exercise = case
        self._together = exercise.takes_all and not exercise.program
        self._taken = exercises_alone(2) if self._together else [exercise]
        layers = layers_for(self._taken, folder)
        self.left = [Job(check, layers, folder, seed) for check in exercise.checks]
        self._verdicts: dict[Check, Verdict] = {}

    def note(self, check: Check, verdict: Verdict) -> None:
        """A check has ended."""
        self.at_work -= 1
        self._verdicts[check] = verdict

    @property
    def goes_on(self) -> bool:
        """Whether there is a check to begin: what is wrong is not looked at any further."""
        right = all(verdict.state == "right" for verdict in self._verdicts.values())
        return bool(self.left) and right

    @property
    def is_over(self) -> bool:
        return not self.at_work and not self.goes_on

    @property
    def is_wrong_together(self) -> bool:
        """Whether all that the student has written of minifsdp's files was graded at once, and is
        wrong, so that more has to run to say where."""
        return self._together and self.result.state == "wrong"

    @property
    def result(self) -> Result:
        """As far as it is known."""
        exercise = self.case[1]
        in_order = [self._verdicts[c] for c in exercise.checks if c in self._verdicts]
        for state in ("wrong", "inconclusive"):  # the first counts for more
            if found := next((v for v in in_order if v.state == state), None):
                return Result(exercise, *found)
        return Result(exercise, "right")

    def with_file_at_fault(self, *how: Any) -> Result:
        """The result of what is wrong together. Runs checks.

        Args:
            how: seed, patience, workers and keep, as in grade().
        """
        folder = self.case[0]
        check = next(c for c, verdict in self._verdicts.items() if verdict.state == "wrong")
        where = file_at_fault(check, layers_for(self._taken, folder), folder, *how)
        return self.result._replace(message=f"{self.result.message} {where}")


def next_jobs(running: Sequence[Running], of_job: dict[Job, Running]) -> Iterator[Job]:
    """What to run, asked for when there is room: of the first exercise that nothing runs of, its
    next check. If something runs of each, then of the first, although it may turn out needless.

    Args:
        of_job: is told whose each job is.
    """
    while going_on := [one for one in running if one.goes_on]:
        one = next((one for one in going_on if not one.at_work), going_on[0])
        job = one.left.pop(0)
        one.at_work += 1
        of_job[job] = one
        yield job

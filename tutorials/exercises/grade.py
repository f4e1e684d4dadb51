"""Grade a student's folder: `make grade DIR=~/my-fsdp`, or with EX=limiter.1 one exercise.
TRACK=1 grades the program that the student writes, TRACK=2 the functions of minifsdp.

Exit code: 0 if everything that is done is right, 1 if something is wrong or inconclusive, 2 if
there is nothing to grade.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tutorials.exercises import source
from tutorials.exercises.at_fault import file_at_fault
from tutorials.exercises.catalog import Check, Exercise, exercises, exercises_alone
from tutorials.exercises.court import Court
from tutorials.exercises.expected import fingerprint
from tutorials.exercises.inside import Job
from tutorials.exercises.judge import Verdict
from tutorials.exercises.overlay import layers_for
from tutorials.exercises.report import Result, gradescope, inconclusive, table, write
from tutorials.exercises.sandbox import run_all


def grade(
    folder: Path,
    chosen: Sequence[Exercise],
    seed: int = 0,
    patience: float = 1,
    workers: int | None = None,
    keep: bool = True,
) -> list[Result]:
    """Grade some exercises, each by itself: functions on top of the reference, programs alone.

    Args:
        folder: the student's.
        seed: of the random numbers in the checks; another one asks the same with other numbers.
        patience: by how much slower than a laptop this machine is, if it has nothing else to do;
            stretches time limits.
        workers: processes at a time.
        keep: whether to keep what the reference gives, and to use what was kept.
    """
    return grade_all([(folder, exercise) for exercise in chosen], seed, patience, workers, keep)


def grade_all(
    cases: Sequence[tuple[Path, Exercise]],
    seed: int = 0,
    patience: float = 1,
    workers: int | None = None,
    keep: bool = True,
) -> list[Result]:
    """Grade exercises of several folders; the arguments are those of :func:`grade`."""
    asked = [(exercise, (folder, _graded_as(exercise, folder))) for folder, exercise in cases]
    cases = list(dict.fromkeys(case for _, case in asked))
    results = [_before_running(exercise, folder) for folder, exercise in cases]
    to_run = [i for i, result in enumerate(results) if result.state == "right"]
    workers = workers or os.cpu_count() or 1
    checks = {check: None for i in to_run for check in cases[i][1].checks}  # each once, in order
    court = Court(checks, seed, patience, workers, keep)
    before = fingerprint()
    case_of: dict[Job, int] = {}
    verdicts: dict[int, dict[Check, Verdict]] = {i: {} for i in to_run}

    def jobs() -> Iterator[Job]:
        """The first checks of all cases, then the second ones of those that are right so far."""
        all_jobs = {i: _jobs(*cases[i], seed) for i in to_run}
        for number in range(max(map(len, all_jobs.values()), default=0)):
            for i in to_run:
                right = all(v.state == "right" for v in verdicts[i].values())
                if number < len(all_jobs[i]) and right:
                    case_of[all_jobs[i][number]] = i
                    yield all_jobs[i][number]

    for job, report in run_all(jobs(), workers, patience):
        verdicts[case_of[job]][job.check] = court.verdict(job.check, report)
    for i in to_run:
        in_order = [verdicts[i][check] for check in cases[i][1].checks if check in verdicts[i]]
        for state in ("inconclusive", "wrong"):  # the second counts for more
            if found := next((v for v in in_order if v.state == state), None):
                results[i] = Result(cases[i][1], *found)
        if results[i].state == "wrong" and _is_together(cases[i][1]):
            check = next(c for c, v in verdicts[i].items() if v.state == "wrong")
            layers = layers_for(exercises_alone(2), cases[i][0])
            where = file_at_fault(check, layers, cases[i][0], seed, patience, workers, keep)
            results[i] = results[i]._replace(message=f"{results[i].message} {where}")
    if fingerprint() != before:
        changed = "the files of the grader were changed while the exercises ran"
        return [Result(exercise, "wrong", changed) for exercise, _ in asked]
    of_case = dict(zip(cases, results, strict=True))
    return [_told_of(exercise, of_case[case]) for exercise, case in asked]


def _told_of(exercise: Exercise, result: Result) -> Result:
    """The result of what an exercise is graded as, for this exercise."""
    whole, state, message = result
    if message and whole is not exercise:
        message = f"graded with the whole file, which has grown, as {whole.key}: {message}"
    return Result(exercise, state, message)


def _graded_as(exercise: Exercise, folder: Path) -> Exercise:
    """What an exercise is graded as: itself, or the whole program. For when that has grown, its
    functions do not fit to those of the first program any more, and are graded together."""
    if not exercise.program or exercise.takes_all:
        return exercise
    steps = [e for e in exercises().values() if e.needs]
    path = folder / exercise.file
    try:
        if all(source.lacks(step, path) for step in steps):
            return exercise
    except source.Complaint:  # which is told of any exercise
        return exercise
    same = [e for e in exercises().values() if e.program == exercise.program]
    return next(e for e in same if e.takes_all)


def _jobs(folder: Path, exercise: Exercise, seed: int) -> list[Job]:
    """What to run for an exercise: its checks, with the student's version of it alone."""
    layers = layers_for(exercises_alone(2) if _is_together(exercise) else [exercise], folder)
    return [Job(check, layers, folder, seed) for check in exercise.checks]


def _is_together(exercise: Exercise) -> bool:
    """Whether all that the student has written of minifsdp's files is graded at once."""
    return exercise.takes_all and not exercise.program


def _before_running(exercise: Exercise, folder: Path) -> Result:
    """What can be said without running anything; "right" if that is nothing."""
    try:
        if not exercise.takes_all:
            done = source.is_done(exercise, folder / exercise.file)
            return Result(exercise, "right") if done else Result(exercise, "to do", exercise.todo)
        if exercise.program:
            left = source.lacks(exercise, folder / exercise.file)
            says = f"{exercise.file} does not have yet: {', '.join(left)}. {exercise.todo}"
            return Result(exercise, "to do", says) if left else Result(exercise, "right")
        left = [e.key for e in exercises_alone(2) if _before_running(e, folder).state != "right"]
    except source.Complaint as complaint:
        return Result(exercise, "wrong", str(complaint))
    if left:
        return Result(exercise, "to do", f"when all others are done; not yet: {', '.join(left)}")
    return Result(exercise, "right")


def choose(key: str, track: int | None = None) -> list[Exercise]:
    """The exercises that ``key`` names: all if it is empty, all of a file ("limiter"), or one. And
    of these the ones of a track, if there is one."""
    found = [e for e in exercises().values() if not key or key in (e.key, e.key.partition(".")[0])]
    found = [exercise for exercise in found if track in (None, exercise.track)]
    if not found:
        there = ", ".join(e.key for e in exercises().values() if track in (None, e.track))
        raise SystemExit(f"there is no exercise {key!r}; there are: {there}")
    return found


def begun(chosen: Sequence[Exercise], folder: Path) -> list[Exercise]:
    """Of some exercises those of the tracks that are begun; if none is, of the first."""
    states = [(e.track, _before_running(_graded_as(e, folder), folder).state) for e in chosen]
    tracks = {track for track, state in states if state == "right"} or {chosen[0].track}
    return [exercise for exercise in chosen if exercise.track in tracks]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make grade", description=__doc__)
    parser.add_argument("folder", type=Path, help="the student's folder, as make student makes it")
    parser.add_argument(
        "--exercise", default="", help="such as limiter.1, or limiter for all of a file"
    )
    parser.add_argument("--track", choices=("", "1", "2"), default="", help="1 or 2")
    parser.add_argument(
        "--results", type=Path, help="also write Gradescope's results.json to this file"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers in the checks")
    parser.add_argument(
        "--hidden-seed", type=int, help="grade those without ranks again, for half of their points"
    )
    parser.add_argument(
        "--patience", type=float, default=1, help="stretch all time limits by this factor"
    )
    parser.add_argument(
        "--workers", type=int, help="processes at a time; as many as there are CPUs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder.expanduser().resolve()
    chosen = choose(options.exercise, int(options.track) if options.track else None)
    if not any(
        (folder / exercise.file).is_file() for exercise in exercises().values() if exercise.file
    ):
        print(f"{folder} has no file of the exercises; make student OUT={folder} makes them.")
        return 2
    if not (options.exercise or options.track or options.results):
        chosen = begun(chosen, folder)
    how = {"patience": options.patience, "workers": options.workers, "keep": not options.results}
    results = grade(folder, chosen, options.seed, **how)
    print(table(results))
    if options.results is not None:
        # Those with ranks only once: a container with half a core has ten minutes.
        alone = [e for e in chosen if all(check.ranks == 1 for check in e.checks)]
        hidden = alone if options.hidden_seed is not None else []
        tests = gradescope([result for result in results if result.exercise not in hidden])
        tests += gradescope([r for r in results if r.exercise in hidden], share=0.5)
        if hidden:
            again = grade(folder, hidden, options.hidden_seed, **how)
            tests += gradescope(again, "after_published", share=0.5)
            results = [*results, *again]
        write(options.results, tests, list(dict.fromkeys(inconclusive(results))))
    return 1 if any(result.state in ("wrong", "inconclusive") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

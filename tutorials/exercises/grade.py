"""Grade a student's folder: `make grade DIR=~/my-fsdp`, or with EX=limiter.1 one exercise.
TRACK=1 grades the program that the student writes, TRACK=2 the functions of minifsdp.

Exit code: 0 if everything that is done is right, 1 if something is wrong or inconclusive, 2 if
there is nothing to grade.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from minifsdp.sim.cli.files import file_problem
from minifsdp.sim.cli.terminal import columns, end_tidily, progress, reader_has_left, typed
from tutorials.exercises import source
from tutorials.exercises.catalog import Exercise, exercises, exercises_alone
from tutorials.exercises.court import Court
from tutorials.exercises.expected import fingerprint
from tutorials.exercises.inside import Job
from tutorials.exercises.report import (
    Result,
    as_json,
    gradescope,
    in_colour,
    inconclusive,
    newest,
    what_next,
    write,
)
from tutorials.exercises.running import Running, next_jobs
from tutorials.exercises.sandbox import processes_at_a_time, run_all


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
    try:
        return list(one_by_one(cases, seed, patience, workers, keep))
    except FilesChanged as changed:
        return [Result(exercise, "wrong", str(changed)) for _, exercise in cases]


class FilesChanged(Exception):  # noqa: N818  # nothing is wrong with the grader
    """While exercises ran somebody has changed what says what is right: no result counts."""


def one_by_one(
    cases: Sequence[tuple[Path, Exercise]],
    seed: int = 0,
    patience: float = 1,
    workers: int | None = None,
    keep: bool = True,
) -> Iterator[Result]:
    """The results of :func:`grade_all`, in their order, each as soon as it and those before it are
    known.

    Raises:
        FilesChanged: at the end.
    """
    asked = [(exercise, (folder, _graded_as(exercise, folder))) for folder, exercise in cases]
    results = {case: _before_running(case[1], case[0]) for _, case in asked}
    workers = workers or processes_at_a_time()
    running = [Running(case, seed) for case in results if results[case].state == "right"]
    checks = {job.check: None for one in running for job in one.left}  # each once, in order
    before, told = fingerprint(), 0
    waiting = {one.case for one in running}
    with Court(checks, seed, patience, workers, keep) as court:
        of_job: dict[Job, Running] = {}
        reports = run_all(next_jobs(running, of_job), workers, patience)
        for number, (job, report) in enumerate(reports, 1):
            one = of_job[job]
            one.note(job.check, court.verdict(job.check, report))
            left = sum(one.at_work + len(one.left) for one in running if not one.is_over)
            progress(f"{number} of at most {number + left} checks")
            if one.is_over and not one.is_wrong_together:
                results[one.case] = one.result
                waiting.discard(one.case)
                while told < len(asked) and asked[told][1] not in waiting:
                    yield _told_of(asked[told][0], results[asked[told][1]])
                    told += 1
    for one in running:
        if one.case in waiting:  # this takes runs of its own
            results[one.case] = one.with_file_at_fault(seed, patience, workers, keep)
    for exercise, case in asked[told:]:
        yield _told_of(exercise, results[case])
    if fingerprint() != before:
        raise FilesChanged("the files of the grader were changed while the exercises ran")


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


def _before_running(exercise: Exercise, folder: Path) -> Result:
    """What can be said without running anything; "right" if that is nothing."""
    try:
        if not exercise.takes_all:
            done = source.is_done(exercise, folder / exercise.file)
            return Result(exercise, "right") if done else Result(exercise, "to do", exercise.todo)
        if exercise.program:
            left = source.lacks(exercise, folder / exercise.file)
            says = f"{exercise.file} does not use yet: {', '.join(left)}. {exercise.todo}"
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
        print(f"there is no exercise {key!r}; there are: {there}", file=sys.stderr)
        raise SystemExit(2)
    return found


def begun(chosen: Sequence[Exercise], folder: Path) -> list[Exercise]:
    """Of some exercises those of the tracks that are begun; if none is, of the first."""
    states = [(e.track, _before_running(_graded_as(e, folder), folder).state) for e in chosen]
    tracks = {track for track, state in states if state == "right"} or {chosen[0].track}
    return [exercise for exercise in chosen if exercise.track in tracks]


def main() -> int:
    try:
        status = graded(parsed())
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return reader_has_left()


def graded(options: argparse.Namespace) -> int:
    """Grade, and print what was found. Returns the exit status: 1 if something is not right, 2 if
    nothing can be graded."""
    end_tidily()
    torch.set_num_threads(1)
    folder = options.folder.expanduser().resolve()
    chosen = choose(options.exercise, int(options.track) if options.track else None)
    if not any(
        (folder / exercise.file).is_file() for exercise in exercises().values() if exercise.file
    ):
        print(f"{folder} has no file of the exercises; make student OUT={folder} makes them.")
        return 2
    if options.results and (problem := file_problem(options.results)):
        print(f"--results: cannot write {str(options.results)!r}: {problem}", file=sys.stderr)
        return 2
    if not (options.exercise or options.track or options.results):
        chosen = begun(chosen, folder)
    how = {"patience": options.patience, "workers": options.workers, "keep": not options.results}
    results: list[Result] = []
    try:
        for result in one_by_one([(folder, e) for e in chosen], options.seed, **how):
            results.append(result)
            if not options.json:
                tell(chosen, results)
    except FilesChanged as changed:
        results = [Result(exercise, "wrong", str(changed)) for exercise in chosen]
        if not options.json:
            print(f"{changed}, so that none of this counts")
    progress("")
    print(as_json(results) if options.json else "\n".join(what_next(results)))
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


def tell(chosen: Sequence[Exercise], results: Sequence[Result]) -> None:
    """Print the last of the results; after the last one of a track its sum, too."""
    progress("")
    for line in newest(chosen, results, min(columns(otherwise=101) - 5, 96)):
        print(in_colour(line), flush=True)


def parsed() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(prog=typed(), description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("~/my-fsdp"),
        help="the student's folder, as make student makes it; default: ~/my-fsdp",
    )
    parser.add_argument(
        "--exercise", default="", help="such as limiter.1, or limiter for all of a file"
    )
    parser.add_argument("--track", choices=("", "1", "2"), default="", help="1 or 2")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: results with exercise, state, points and message, and the "
        "points of each track",
    )
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
    parser.add_argument("--workers", type=int, help="processes at a time; two for each CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Whether the course itself is right: `make kit-check`.

- A new student's folder can be imported, and every exercise in it says that it is to be written.
- With the reference as the solution everything is right, and gives 100 points for each track. Of a
  program that has grown the earlier exercises are right as well.
- Each exercise fails if its functions do nothing.
- Each wrong solution in wrong/ is found, with a message that points the right way.
- Each right but different solution in right/ passes, and all of track two pass together.1 at once:
  none of them breaks a rule that its own exercise says nothing of.
- Each mistake in mistakes.toml can be seen, and is gone when its line is mended.
- Of each lab the student's file is right and no better than the default, our solution is right and
  reaches the figure to beat, and the wrong solutions in labs/wrong.toml are found.
"""

import ast
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from minifsdp.sim.cli.terminal import end_tidily, progress
from tutorials import grow
from tutorials.exercises import lab, picture, source
from tutorials.exercises.catalog import (
    HERE,
    Exercise,
    Wrong,
    exercises,
    exercises_alone,
    tomllib,
    wrong_solutions,
)
from tutorials.exercises.grade import grade, grade_all
from tutorials.exercises.judge import verdict
from tutorials.exercises.mistakes import look, mistakes
from tutorials.exercises.report import Result
from tutorials.exercises.student import make


class Case(NamedTuple):
    """A solution, and what is expected of the grader."""

    name: str
    exercise: Exercise
    text: str
    right: bool
    says: str = ""


def cases() -> Iterator[Case]:
    """All solutions that are graded, right and wrong."""
    for exercise in exercises_alone():
        yield Case(f"{exercise.key} does nothing", exercise, _doing_nothing(exercise), False)
    for wrong in wrong_solutions():
        exercise = exercises()[wrong.exercise]
        text = _changed(exercise, wrong.original, wrong.replacement)
        yield Case(f"{wrong.exercise}, wrong: {wrong.mistake}", exercise, text, False, wrong.says)
    for right in tomllib.loads((HERE / "right" / "grow.toml").read_text())["right"]:
        exercise = exercises()[right["exercise"]]
        text = _changed(exercise, right["original"], right["replacement"])
        yield Case(f"{exercise.key}, right: {right['solution']}", exercise, text, True)
    for path in sorted((HERE / "right").glob("*.py")):
        key = ".".join(path.stem.rsplit("_", 1))
        yield Case(f"{key}, right but different", exercises()[key], path.read_text(), True)


def _changed(exercise: Exercise, original: str, replacement: str) -> str:
    """The reference with a change."""
    text = exercise.reference
    if (number := text.count(original)) != 1:
        raise ValueError(
            f"{exercise.key}: what is replaced occurs {number} times in "
            f"{exercise.program or exercise.module}.py: {original!r}"
        )
    return text.replace(original, replacement)


def _doing_nothing(exercise: Exercise) -> str:
    """The reference, with functions that do nothing in place of those of the exercise."""
    tree = ast.parse(exercise.reference)
    for node in source.functions(exercise, source.definitions(tree)).values():
        node.body = [ast.Pass()]  # type: ignore[union-attr]
    return ast.unparse(ast.fix_missing_locations(tree))


def check_student_folder(folder: Path) -> list[str]:
    """Of a new folder: it can be read, and nothing in it is done."""
    make(folder)
    problems = []
    for path in folder.glob("*.py"):
        compile(path.read_text(), path, "exec")
    for exercise, state, message in grade(folder, list(exercises().values())):
        if state != "to do" or not (exercise.key in message or exercise.key == "together.1"):
            problems.append(f"{exercise.key} in a new folder: {state}, {message}")
    return problems


def check_reference(folder: Path) -> list[str]:
    """Of a folder with the reference in it: everything is right."""
    cases = []
    for exercise in exercises().values():
        # The program of its step, the one after it, and the last one; of all it would take minutes.
        later = grow.NAMES[grow.NAMES.index(exercise.program) :] if exercise.program else [""]
        for program in dict.fromkeys([*later[:2], later[-1]]):
            (folder / program).mkdir(exist_ok=True)
            if exercise.file:
                text = grow.text(program) if program else exercise.reference
                (folder / program / exercise.file).write_text(text)
            cases.append((folder / program, exercise))
    results = grade_all(cases)
    problems = [
        f"{r.exercise.key} by the reference, {case[0].name}: {r.message}"
        for case, r in zip(cases, results, strict=True)
        if r.message
    ]
    for track in (1, 2):
        points = sum(e.points for e in exercises().values() if e.track == track)
        if points != 100:
            problems.append(f"track {track} has {points} points, and should have 100")
    return problems


def check_data() -> list[str]:
    """Of exercises.toml: names and pages that exist, three hints, checks and wrong solutions."""
    problems = []
    for exercise in exercises().values():
        if not exercise.checks:
            problems.append(f"{exercise.key} has no check")
        if len(exercise.hints) != 3:
            problems.append(f"{exercise.key} has {len(exercise.hints)} hints, and should have 3")
        if not (HERE.parent / f"{exercise.page}.md").exists():
            problems.append(f"{exercise.key}: there is no page {exercise.page}")
    for exercise in exercises().values():
        if exercise.key == "together.1":
            continue
        there = source.definitions(ast.parse(exercise.reference))
        gone = {*exercise.takes, *exercise.hides} - there.keys()
        problems += [f"{exercise.key}: {exercise.file} has no {name}" for name in gone]
        number = sum(wrong.exercise == exercise.key for wrong in wrong_solutions())
        if number < 2:
            problems.append(f"{exercise.key} has {number} wrong solutions, and should have 2")
    return problems


def check_solutions(folder: Path) -> list[str]:
    """Of wrong and right solutions: what the grader says of each."""
    all_cases = list(cases())
    folders = []
    for i, case in enumerate(all_cases):
        folders.append(folder / str(i))
        folders[-1].mkdir()
        (folders[-1] / case.exercise.file).write_text(case.text)
    graded = [(path, case.exercise) for path, case in zip(folders, all_cases, strict=True)]
    pairs = zip(all_cases, grade_all(graded), strict=True)
    problems = [problem for case, result in pairs for problem in _of_a_solution(case, result)]
    wrong = sum(not case.right for case in all_cases)
    progress("")
    print(f"  {wrong} wrong solutions, {len(all_cases) - wrong} right but different ones")
    return problems


def check_right_at_once(folder: Path) -> list[str]:
    """Of the right but different solutions of track two: all of them in one engine."""
    for exercise in exercises_alone(2):
        (folder / exercise.file).write_text(exercise.reference)
    for path in sorted((HERE / "right").glob("*.py")):
        exercise = exercises()[".".join(path.stem.rsplit("_", 1))]
        if exercise.track == 2 and exercise.key != "limiter.2":  # limiter.3 replaces it
            with (folder / exercise.file).open("a") as file:
                file.write(f"\n\n{path.read_text()}")
    (result,) = grade_all([(folder, exercises()["together.1"])])
    return [f"all right solutions at once: {result.message}"] if result.message else []


# What Python raises for a line that cannot run. That is no symptom: it says where the line is.
OWN_ERRORS = {"AttributeError", "ImportError", "NameError", "TypeError", "UnboundLocalError"}


def check_mistakes(folder: Path) -> list[str]:
    """Of mistakes.toml: each mistake has a symptom, which the reference does not have."""
    problems = []
    for number, mistake in enumerate(mistakes().values(), 1):
        progress(f"mistake {number} of {len(mistakes())}")
        file = mistake.file(folder)
        file.parent.mkdir(parents=True)
        file.write_text(mistake.text)
        expected, found = look(mistake, [mistake.check], file)[0]
        seen = verdict(mistake.check, expected, found)
        if seen.state != "wrong":
            problems.append(f"mistake {mistake.key} has no symptom: {seen.state}, {seen.message}")
        entries = [entry for rank in found.ranks for entry in rank or []]
        own = OWN_ERRORS & {entry.value["raised"] for entry in entries if not entry.what}
        if own:
            problems.append(f"mistake {mistake.key} cannot even run: {', '.join(own)}")
        file.write_text(mistake.text.replace(mistake.replacement, mistake.original))
        expected, found = look(mistake, [mistake.check], file)[0]
        seen = verdict(mistake.check, expected, found)
        if seen.state != "right":
            problems.append(f"mistake {mistake.key}, mended: {seen.state}, {seen.message}")
    return problems


def check_picture() -> list[str]:
    """Of the README's picture: it shows what the grader prints now."""
    if picture.draw() == (HERE / "grade.svg").read_text():
        return []
    return ["grade.svg is not what is printed now: python -m tutorials.exercises.picture"]


def _of_a_solution(case: Case, result: Result) -> Iterator[str]:
    if case.right and result.state != "right":
        yield f"{case.name}: {result.state}, {result.message}"
    elif not case.right and result.state != "wrong":
        yield f"{case.name}: not found ({result.state}, {result.message})"
    elif case.says.lower() not in result.message.lower():
        yield f"{case.name}: the message does not say {case.says!r}: {result.message}"


def wrong_labs() -> list[Wrong]:
    """Our solutions of labs, with a change that makes them wrong."""
    data = tomllib.loads((HERE / "labs" / "wrong.toml").read_text())
    return [Wrong(**entry) for entry in data["wrong"]]


def check_labs(folder: Path, keys: Sequence[str] = ()) -> list[str]:
    """Of the labs: what they say of the student's files, of our solutions and of wrong ones.

    Args:
        folder: empty; wrong solutions are written to it.
        keys: of labs; all if there are none.
    """
    chosen = [one for one in lab.labs().values() if not keys or one.key in keys]
    wrong = [entry for entry in wrong_labs() if entry.exercise in {one.key for one in chosen}]
    cases = [(one, HERE / "labs" / one.key) for one in chosen]
    cases += [(one, lab.SOLUTIONS / one.key) for one in chosen]
    for i, entry in enumerate(wrong):
        cases.append((lab.labs()[entry.exercise], folder / str(i)))
        shutil.copytree(lab.SOLUTIONS / entry.exercise, folder / str(i))
        for path in (folder / str(i)).glob("*.py"):
            assert path.read_text().count(entry.original) == 1, entry
            path.write_text(path.read_text().replace(entry.original, entry.replacement))
    outcomes = lab.run(cases)
    n = len(chosen)
    problems = [
        f"{o.lab.key} as it is given: {lab.show(o)}" for o in outcomes[:n] if o.better or o.wrong
    ]
    problems += [
        f"{o.lab.key}, our solution: {lab.show(o)}" for o in outcomes[n : 2 * n] if not o.reached
    ]
    for entry, outcome in zip(wrong, outcomes[2 * n :], strict=True):
        found = outcome.wrong if entry.says else not outcome.better
        if not found or entry.says not in outcome.wrong:
            problems.append(f"{entry.exercise}, {entry.mistake}: not found: {lab.show(outcome)}")
    return problems


PARTS: dict[str, Callable[[Path], list[str]]] = {
    "the exercises' data": lambda folder: check_data(),
    "a new student's folder": check_student_folder,
    "the reference": check_reference,
    "wrong and right solutions": check_solutions,
    "all right solutions of track two at once": check_right_at_once,
    "mistakes to find": check_mistakes,
    "the picture of the README": lambda folder: check_picture(),
    "the labs": check_labs,
}
"""What is checked, each part in an empty folder."""


def main() -> int:
    """Check everything; 1 if something is wrong."""
    end_tidily()
    torch.set_num_threads(1)
    began, problems = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        for number, (what, check) in enumerate(PARTS.items(), 1):
            print(f"{number} of {len(PARTS)}: {what}", flush=True)
            folder = Path(name).resolve() / str(number)
            folder.mkdir()
            found = check(folder)
            progress("")
            print("".join(f"  {problem}\n" for problem in found), end="", flush=True)
            problems += found
    seconds = time.monotonic() - began
    print(f"{len(problems)} problems" if problems else f"the course is right ({seconds:.0f} s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

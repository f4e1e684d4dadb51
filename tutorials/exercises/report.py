"""Results of grading: as a table for a terminal, and as Gradescope's results.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tutorials.exercises.catalog import Exercise


class Result(NamedTuple):
    """Of one exercise. ``message`` says what is wrong, or that nothing is written yet."""

    exercise: Exercise
    state: str  # "right", "wrong", "to do", "inconclusive"
    message: str = ""

    @property
    def points(self) -> int:
        return self.exercise.points if self.state == "right" else 0


def table(results: Sequence[Result]) -> str:
    """The results for a terminal: a line for each exercise, what is wrong, and what to do next."""
    signs = {"right": "✓", "wrong": "✗", "to do": "·", "inconclusive": "?"}
    lines = []
    for track in sorted({result.exercise.track for result in results}):
        lines += _lines([result for result in results if result.exercise.track == track], signs)
    following = next((r for r in results if r.state != "right"), None)
    if keys := inconclusive(results):
        lines.append(f"\n{_run_again(keys)}")
    elif following is not None:
        exercise = following.exercise
        do = "mend" if following.state == "wrong" else "write"
        what = f"{exercise.where}, " if exercise.file else ""
        lines.append(f"\nNext: {do} {exercise.key} ({what}about {exercise.minutes} minutes).")
        if following.state == "to do" and exercise.needs:
            lines.append(following.message.partition(". ")[0] + ".")  # what begins it
        lines.append(f"Read tutorials/{exercise.page}.md; make hint EX={exercise.key} helps.")
    elif any(result.exercise.key == "together.1" for result in results):
        lines.append("\nEverything is right. make demo STUDENT=... trains a GPT with it.")
    else:
        lines.append("\nThat is right. make grade without EX tells what to do next.")
    return "\n".join(lines)


def _lines(results: Sequence[Result], signs: dict[str, str]) -> list[str]:
    """Of the exercises of one track, and their sum."""
    lines, width = [], max(len(result.exercise.key) for result in results)
    for exercise, state, message in results:
        points = f"{exercise.points if state == 'right' else 0:>2}/{exercise.points:<2}"
        lines.append(f"{signs[state]} {exercise.key:<{width}} {points}  {exercise.title}")
        if state in ("wrong", "inconclusive"):
            lines += _folded(_words(state, message))
    got, of = sum(r.points for r in results), sum(r.exercise.points for r in results)
    lines.append(f"  {'':<{width}} {got:>2}/{of:<3} points, track {results[0].exercise.track}")
    return lines


def _words(state: str, message: str) -> str:
    """What is said of an exercise that is not right."""
    return f"Inconclusive, run again: {message}" if state == "inconclusive" else message


def inconclusive(results: Sequence[Result]) -> list[str]:
    """The exercises of which nobody knows whether they are right."""
    return [result.exercise.key for result in results if result.state == "inconclusive"]


def _run_again(keys: Sequence[str]) -> str:
    return (
        f"Inconclusive: {', '.join(keys)}. Nobody knows whether that is right, so its points are "
        f"not counted yet. Run again. If it stays so on a machine that does nothing else, ranks "
        f"wait for each other."
    )


def _folded(message: str, width: int = 96) -> list[str]:
    words, lines = message.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}"
    return [f"    {line}" for line in lines]


def gradescope(
    results: Sequence[Result], visibility: str = "visible", share: float = 1
) -> list[dict[str, Any]]:
    """The results as ``tests`` of Gradescope's results.json.

    Args:
        visibility: "visible", or "after_published" for those that students see later.
        share: of the points that these tests are worth.
    """
    return [
        {
            "name": f"{result.exercise.key}: {result.exercise.title}",
            "score": round(result.points * share, 2),
            "max_score": round(result.exercise.points * share, 2),
            "status": "passed" if result.state == "right" else "failed",
            "output": _words(result.state, result.message) or "right",
            "visibility": visibility,
        }
        for result in results
    ]


def write(path: Path, tests: list[dict[str, Any]], open_keys: Sequence[str] = ()) -> None:
    """Write results.json as a new file, whatever may be in its place.

    Args:
        open_keys: exercises that are inconclusive. Gradescope knows no such state: they have no
            points in it, and students and instructors are told.
    """
    content: dict[str, Any] = {"score": sum(t["score"] for t in tests), "tests": tests}
    if open_keys:
        content |= {"output": _run_again(open_keys), "extra_data": {"inconclusive": [*open_keys]}}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.replace(path)

"""Results of grading: as a table for a terminal, and as Gradescope's results.json."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minifsdp.sim.cli.terminal import painted
from tutorials.exercises.catalog import Exercise


class Result(NamedTuple):
    """Of one exercise. ``message`` says what is wrong, or that nothing is written yet."""

    exercise: Exercise
    state: str  # "right", "wrong", "to do", "inconclusive"
    message: str = ""

    @property
    def points(self) -> int:
        return self.exercise.points if self.state == "right" else 0


SIGNS = {"right": "✓", "wrong": "✗", "to do": "·", "inconclusive": "?"}
COLOURS = {"✓": "green", "✗": "red", "·": "grey", "?": "yellow", " ": "grey"}
"""Of a line's first character; what is said of an exercise begins with a space."""


def table(results: Sequence[Result]) -> str:
    """The results for a terminal: a line for each exercise, what is wrong, and what to do next."""
    chosen = [result.exercise for result in results]
    lines = [line for i in range(len(results)) for line in newest(chosen, results[: i + 1])]
    return "\n".join([*lines, *what_next(results)])


def newest(chosen: Sequence[Exercise], results: Sequence[Result], width: int = 96) -> list[str]:
    """The lines of the last result.

    Args:
        chosen: the exercises that are graded, whose results come in this order.
        results: so far. After the last one of a track there is its sum.
        width: of what is said of an exercise.
    """
    exercise, state, message = results[-1]
    keys = max(len(one.key) for one in chosen if one.track == exercise.track)
    points = f"{results[-1].points:>2}/{exercise.points:<2}"
    lines = [f"{SIGNS[state]} {exercise.key:<{keys}} {points}  {exercise.title}"]
    if state in ("wrong", "inconclusive"):
        lines += _wrapped(_words(state, message), width + 4, " " * 5)
    mine = [result for result in results if result.exercise.track == exercise.track]
    if len(mine) == sum(one.track == exercise.track for one in chosen):
        got, of = sum(r.points for r in mine), sum(r.exercise.points for r in mine)
        lines.append(f"  {'':<{keys}} {got:>2}/{of:<3} points, track {exercise.track}")
    return lines


def what_next(results: Sequence[Result]) -> list[str]:
    """Lines that say what to do now, after an empty one."""
    following = next((r for r in results if r.state != "right"), None)
    if keys := inconclusive(results):
        return ["", _run_again(keys)]
    if following is not None:
        exercise = following.exercise
        if following.state == "to do" and exercise.takes_all and not exercise.file:
            last = f"{exercise.key} is graded {following.message}."
            return ["", *_wrapped(last, 96), "make grade without EX tells what to do next."]
        do = "mend" if following.state == "wrong" else "write"
        what = f"{exercise.where}, " if exercise.file else ""
        lines = ["", f"Next: {do} {exercise.key} ({what}about {exercise.minutes} minutes)."]
        if following.state == "to do" and exercise.needs:
            lines.append(following.message.partition(". ")[0] + ".")  # what begins it
        return [
            *lines,
            f"Read tutorials/{exercise.page}.md; make hint EX={exercise.key} helps.",
        ]
    if any(result.exercise.key == "together.1" for result in results):
        return ["", "Everything is right. make demo STUDENT=... trains a GPT with it."]
    return ["", "That is right. make grade without EX tells what to do next."]


def in_colour(line: str) -> str:
    """A line of :func:`newest` as a terminal shows it: its sign in a colour, or, if it has none,
    all of it, in grey."""
    sign = line[:1]
    coloured = line if sign == " " else sign
    return painted(coloured, COLOURS[sign]) + line.removeprefix(coloured)


def as_json(results: Sequence[Result]) -> str:
    """The results for a program."""
    tracks = sorted({result.exercise.track for result in results})
    of_track = {t: [r for r in results if r.exercise.track == t] for t in tracks}
    document = {
        "results": [
            {
                "exercise": result.exercise.key,
                "title": result.exercise.title,
                "track": result.exercise.track,
                "state": result.state,
                "points": result.points,
                "of": result.exercise.points,
                "message": result.message,
            }
            for result in results
        ],
        "tracks": {
            str(track): {
                "points": sum(r.points for r in mine),
                "of": sum(r.exercise.points for r in mine),
            }
            for track, mine in of_track.items()
        },
    }
    return json.dumps(document, indent=1, ensure_ascii=False)


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


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


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

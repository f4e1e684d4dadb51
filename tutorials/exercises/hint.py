"""`make hint EX=limiter.1` gives the first hint; N=2 and N=3 give the next ones."""

import argparse
import sys
import textwrap
from itertools import groupby

from minifsdp.sim.cli.terminal import columns, typed
from tutorials.exercises.catalog import exercises


def main(key: str, number: int = 1) -> int:
    """Print a hint of an exercise; returns the exit status."""
    found = exercises()
    if not key:
        print("Name an exercise: make hint EX=limiter.1 (or: minifsdp hint limiter.1). There are")
        print(textwrap.fill(f"{names()}.", min(columns(otherwise=100), 100)))
        return 0
    if key not in found:
        print(f"there is no exercise {key!r}; there are {names()}", file=sys.stderr)
        return 2
    exercise = found[key]
    print(f"{key}, {exercise.title}: {exercise.where}")
    print(f"The page to read is tutorials/{exercise.page}.md.")
    print(f"\n{number}. {exercise.hints[number - 1]}")
    if number < 3:
        print(f"\nIf that is not enough: make hint EX={key} N={number + 1}")
    return 0


def names() -> str:
    """All exercises, those of a file together: build.1 to 8, ..."""
    files = groupby(exercises(), lambda key: key.partition(".")[0])
    ends = [(keys[0], keys[-1].partition(".")[2]) for keys in (list(its) for _, its in files)]
    return ", ".join(
        first if first.endswith(f".{last}") else f"{first} to {last}" for first, last in ends
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=typed(), description=__doc__)
    parser.add_argument("exercise", nargs="?", default="", help="such as limiter.1")
    parser.add_argument("number", nargs="?", type=int, choices=(1, 2, 3), default=1, help="1 to 3")
    options = parser.parse_args()
    sys.exit(main(options.exercise, options.number))

"""`make hint EX=limiter.1` gives the first hint; N=2 and N=3 give the next ones."""

import sys

from tutorials.exercises.catalog import exercises


def main(key: str, number: str = "1") -> None:
    """Print a hint of an exercise."""
    found = exercises()
    if key not in found:
        raise SystemExit(f"there is no exercise {key!r}; there are: {', '.join(found)}")
    exercise = found[key]
    if number not in ("1", "2", "3"):
        raise SystemExit(f"N={number}: there are three hints, N=1, N=2 and N=3")
    print(f"{key}, {exercise.title}: {exercise.where}")
    print(f"The page to read is tutorials/{exercise.page}.md.")
    print(f"\n{number}. {exercise.hints[int(number) - 1]}")
    if number != "3":
        print(f"\nIf that is not enough: make hint EX={key} N={int(number) + 1}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`make demo STUDENT=~/my-fsdp`: train a small GPT with what the student has written.

Each rank runs tutorials/train_gpt.py, with the student's functions laid over the reference.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

from tutorials.exercises import source
from tutorials.exercises.catalog import HERE, Exercise, exercises_alone
from tutorials.exercises.overlay import Overlay, layers_for

TRAIN = HERE.parent / "train_gpt.py"


def written(folder: Path) -> list[Exercise]:
    """The exercises that are done, right or wrong.

    Raises:
        SystemExit: a file cannot be read, or a function has other arguments.
    """
    try:
        return [e for e in exercises_alone(2) if source.is_done(e, folder / e.file)]
    except source.Complaint as complaint:
        raise SystemExit(str(complaint)) from None


def lay_over(folder: Path) -> list[str]:
    """On a rank: what is imported from now on is the student's, where it is written. The keys."""
    done = written(folder)
    Overlay(layers_for(done, folder)).install()
    return [exercise.key for exercise in done]


def start_ranks(program: str, folder: Path, arguments: tuple[str, ...]) -> None:
    """Say what is the student's, and run this module on one rank for each GPU, or on two."""
    done = written(folder)
    print(f"yours: {', '.join(exercise.key for exercise in done) or 'nothing yet'}")
    if left := [exercise.key for exercise in exercises_alone(2) if exercise not in done]:
        print(f"from the reference: {', '.join(left)}")
    from tutorials import train_gpt  # not at the top: on a rank the student's files come first

    module = f"tutorials.exercises.{program}"
    train_gpt.start_ranks(torch.cuda.device_count() or 2, ["-m", module, str(folder), *arguments])


def main(folder: str, *arguments: str) -> None:
    """Start the ranks; or, on a rank, train."""
    student = Path(folder).expanduser().resolve()
    if "RANK" not in os.environ:
        start_ranks("demo", student, arguments)
        return
    lay_over(student)
    sys.argv = [str(TRAIN), *arguments]
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])

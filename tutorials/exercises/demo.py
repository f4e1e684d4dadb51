"""`make demo STUDENT=~/my-fsdp`: train a small GPT with what the student has written.

Each rank runs tutorials/train_gpt.py, with the student's functions laid over the reference.
"""

import os
import runpy
import sys
from pathlib import Path

import torch

from tutorials.exercises import source
from tutorials.exercises.catalog import HERE, Exercise, exercises
from tutorials.exercises.overlay import Overlay, layers_for


def written(folder: Path) -> list[Exercise]:
    """The exercises that are done, right or wrong.

    Raises:
        SystemExit: a file cannot be read, or a function has other arguments.
    """
    try:
        every = [exercise for exercise in exercises().values() if not exercise.takes_all]
        return [exercise for exercise in every if source.is_done(exercise, folder / exercise.file)]
    except source.Complaint as complaint:
        raise SystemExit(str(complaint)) from None


def main(folder: str, *arguments: str) -> None:
    """Start the ranks; or, on a rank, train."""
    student = Path(folder).expanduser().resolve()
    done = written(student)
    every = [exercise for exercise in exercises().values() if not exercise.takes_all]
    if "RANK" in os.environ:
        Overlay(layers_for(done, student, every)).install()
        program = str(HERE.parent / "train_gpt.py")
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")
        return
    print(f"yours: {', '.join(exercise.key for exercise in done) or 'nothing yet'}")
    if left := [exercise.key for exercise in every if exercise not in done]:
        print(f"from the reference: {', '.join(left)}")
    ranks = str(torch.cuda.device_count() or 2)
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rank = ["-m", "tutorials.exercises.demo", folder, *arguments]
    torchrun(["--standalone", "--nproc-per-node", ranks, *rank])


if __name__ == "__main__":
    main(*sys.argv[1:])

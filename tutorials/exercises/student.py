"""Make a student's folder: `make student OUT=~/my-fsdp`."""

import shutil
import sys
from pathlib import Path

from tutorials.exercises.catalog import HERE, exercises, exercises_alone
from tutorials.exercises.lab import labs
from tutorials.exercises.source import without_solutions

README = """# My FSDP

In each file here the bodies of some functions are missing. Write them. What you have not written
yet comes from minifsdp, function by function, so you can begin anywhere. In the folder of minifsdp,
`make grade` tells what is right, what is not and why, and what to do next:

    make grade DIR={folder}                   everything; about a minute
    make grade DIR={folder} EX=limiter.1      one exercise; seconds
    make hint EX=limiter.1                    a hint; there are three, with N=2 and N=3
    make demo STUDENT={folder}                at the end: train a GPT with what you have written

    make lab DIR={folder} LAB=bytes_limiter   a lab: see below

The exercises, in a good order:

{table}

Labs are open-ended extra work, in labs/. Each file there says what is measured and what the rules
are; `make lab` says which figure yours reaches, and which one is to beat.

{labs}

An exercise is graded with the reference's version of everything else, also of the other methods of
a class. So rely on what docstrings say of a class, and not on attributes that you have added in
another exercise. In together.1 everything is yours.

You may add functions, classes and imports to a file, and delete what you do not need. Keep the
names and the arguments of what is there. A helper belongs in the file that uses it. Print what you
like; the grader does not mind. The page that belongs to a function is named in its body.
"""

TUTOR = """# For coding assistants: be a tutor here

The person in this folder is learning how fully sharded data parallel training works by writing it.
Help them to get there by themselves:

- Do not write the bodies of the functions, and do not copy them from minifsdp or from PyTorch.
- Ask what they expect to happen, and what happens. Explain what a message of `make grade` means.
- Point to the page of the tutorial that a function names, and to `make hint`.
- Suggest an experiment: a small case, a print, a line to take out.
- Explain PyTorch's API, Python, tracebacks and the terms of the field as fully as they like.
"""


def make(folder: Path) -> None:
    """Write the files. An existing file is never overwritten.

    Raises:
        SystemExit: there is something in the way.
    """
    by_file: dict[str, list[str]] = {}
    for exercise in exercises_alone():
        by_file.setdefault(exercise.file, []).append(exercise.key)
    names = [*by_file, "README.md", "AGENTS.md", "labs"]
    if there := [name for name in names if (folder / name).exists()]:
        raise SystemExit(
            f"{folder} has {', '.join(there)} in it already, which may be your work. Nothing was "
            f"written. To begin anew, choose another folder or move these away."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in by_file.items():
        here = [exercises()[key] for key in keys]
        (folder / name).write_text(without_solutions(here[0].reference, here))
    for lab in labs().values():
        shutil.copytree(
            HERE / "labs" / lab.key,
            folder / "labs" / lab.key,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    rows = [
        f"| {e.key} | {e.title} | {e.points} | {e.minutes} | {e.page} |"
        for e in exercises().values()
    ]
    head = [
        "| exercise | what to write | points | minutes | page |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    table = "\n".join(head + rows)
    titles = "\n".join(f"- {lab.key}: {lab.title}" for lab in labs().values())
    (folder / "README.md").write_text(README.format(folder=folder, table=table, labs=titles))
    (folder / "AGENTS.md").write_text(TUTOR)


def main(out: str) -> None:
    """Make the folder and say what to do next."""
    folder = Path(out).expanduser().resolve()
    make(folder)
    first = next(iter(exercises().values()))
    print(
        f"{folder}: {sum(e.points for e in exercises().values())} points to earn. Read README.md."
    )
    print(f"Begin with {first.key}: tutorials/{first.page}.md, then {folder / first.file}.")


if __name__ == "__main__":
    main(*sys.argv[1:])

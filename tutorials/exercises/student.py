"""Make a student's folder: `make student OUT=~/my-fsdp`."""

import argparse
import shutil
from pathlib import Path

from minifsdp.sim.cli.files import folder_problem
from minifsdp.sim.cli.terminal import typed
from tutorials.exercises.catalog import HERE, exercises, exercises_alone
from tutorials.exercises.context import context
from tutorials.exercises.lab import labs
from tutorials.exercises.source import without_solutions

README = """# My FSDP

There are two tracks, each of 100 points. In the folder of minifsdp, `make grade` tells what is
right, what is not and why, and what to do next:

    make grade DIR={folder}                   what you have begun
    make grade DIR={folder} TRACK=1           one track; TRACK=2 is the other one
    make grade DIR={folder} EX=build.1        one exercise; seconds
    make hint EX=build.1                      a hint; there are three, with N=2 and N=3

You may add functions, classes and imports to a file, and delete what you do not need. Keep the
names and the arguments of what is there. A helper belongs in the file that uses it. Print what you
like; the grader does not mind. The page that belongs to a function is named in its body.

## Track one: build it

You write an FSDP of your own, all of it in `fsdp.py`. The first exercises fill in its functions,
one or two at a time: each is graded with the reference's version of the others. From build.8 on
nothing is the reference's. Then the file goes on growing, a step or two with each exercise grow.1,
grow.2 and so on, to an FSDP with streams, a limiter, prefetching, checkpoints, strategies, low
precision and two groups of ranks. What such a program does is graded, and not how: classes and
helpers are up to you. An exercise is begun when the file uses the name that `make grade` asks for.
What was right is graded again when the file has grown: its first functions together then, as
build.8 is. After build.8 your file trains a GPT beside DDP, and prints how equal the two are:

    make demo ARGS="--program {folder}/fsdp.py"

{one}

## Track two: the concepts of minifsdp

In every other file here the bodies of some functions are missing. Write them. What you have not
written yet comes from minifsdp, function by function, so you can begin anywhere. What each of them
may call is in CONTEXT.md.

    make demo STUDENT={folder}                at the end: train a GPT with what you have written

The exercises, in a good order:

{two}

An exercise is graded with the reference's version of everything else, also of the other methods of
a class. So rely on what docstrings say of a class, and not on attributes that you have added in
another exercise. In together.1 everything is yours.

## Labs

Labs are open-ended extra work, in labs/. Each file there says what is measured and what the rules
are; `make lab` says which figure yours reaches, and which one is to beat.

    make lab DIR={folder} LAB=bytes_limiter

{labs}
"""

CONTRACT = """\
# Track one: this file is yours, and it grows. At first the bodies of functions are missing.
#
# - `fsdp` shards a model in place and returns an engine. The engine has `full_params()`.
# - `module.parameters()` gives the optimizer what this rank keeps, and nothing else.
# - From grow.1 on: `fsdp` makes its streams once, by calling `Streams(device)`, the name that is
#   global here. It uses `.compute`, `.unshard` and, from grow.3 on, `.reduce`, which you add. Each
#   has `submit(launch)`, which starts work and gives an event, `record_event()`,
#   `wait_event(event)` and `record_stream(tensor)`. An event has `wait()`, for the computation to
#   wait, and `synchronize()` and `query()`, for the host. The grader puts the streams of a virtual
#   GPU in the place of this class, and looks at what waits for what.
# - What `fsdp` gets beside the model and the kinds of units, and from when on:
#     grow.5   limit=2: how many units may be alive at once, without those of the modules around the
#              one that is gathered; math.inf: any number.
#     grow.6   forward_prefetch=True: start to gather the next unit before this one computes.
#              Where nothing is known of the order yet, nothing is prefetched.
#     grow.7   backward_prefetch="pre": the same in the backward; "post": once this one is freed;
#              None: not at all.
#     grow.8   Nothing new: from here on torch.utils.checkpoint may be around a unit, inside of
#              one, or around the model. It runs a part of the forward again, in the backward.
#     grow.9   reshard_after_forward=True; False: each unit stays from its forward to its backward.
#              The model's own unit stays in either case, because its backward comes next.
#     grow.10  param_dtype=None: the dtype to gather and to compute in, to which a unit's inputs of
#              floating point are cast. reduce_dtype=None: the dtype that gradients are added up
#              in, as a rule param_dtype. Shards and their gradients stay as they were.
#     grow.11  mesh=None: a DeviceMesh of [replicas, shards] or of [shards]; None: all ranks shard.
#     grow.12  Nothing new: each parameter has its own name, and is this rank's rows of it, in the
#              memory of the shard (a scalar is one row). One with requires_grad=False gets no
#              gradient.
#     grow.13  Nothing new: each parameter is a DTensor, whose shape is that of the whole.
# - Three names say that an exercise is begun: a method `reset`, from grow.4 on, which forgets a
#   step that an exception has ended; a unit's `reasons`, from grow.8 on, for which it is kept; and
#   a method `by_ranks`, from grow.12 on, which puts each rank's rows in one piece.
#
# Everything else may be changed, renamed and added as you like, once build.8 is right.

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
    if problem := folder_problem(folder):
        raise SystemExit(f"{folder} cannot be made: {problem}")
    by_file: dict[str, list[str]] = {}
    for exercise in exercises_alone():
        by_file.setdefault(exercise.file, []).append(exercise.key)
    names = [*by_file, "README.md", "CONTEXT.md", "AGENTS.md", "labs"]
    if there := [name for name in names if (folder / name).exists()]:
        raise SystemExit(
            f"{folder} has {', '.join(there)} in it already, which may be your work. Nothing was "
            f"written. To begin anew, choose another folder or move these away."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in by_file.items():
        here = [exercises()[key] for key in keys]
        text = without_solutions(here)
        (folder / name).write_text(CONTRACT + text if here[0].program else text)
    for lab in labs().values():
        shutil.copytree(
            HERE / "labs" / lab.key,
            folder / "labs" / lab.key,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    tables = {"one": _table(1), "two": _table(2)}
    titles = "\n".join(f"- {lab.key}: {lab.title}" for lab in labs().values())
    (folder / "README.md").write_text(README.format(folder=folder, **tables, labs=titles))
    (folder / "CONTEXT.md").write_text(context())
    (folder / "AGENTS.md").write_text(TUTOR)


def _table(track: int) -> str:
    """The exercises of a track."""
    rows = [
        f"| {e.key} | {e.title} | {e.points} | {e.minutes} | {e.page} |"
        for e in exercises().values()
        if e.track == track
    ]
    head = [
        "| exercise | what to write | points | minutes | page |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    return "\n".join(head + rows)


def main(out: Path) -> None:
    """Make the folder and say what to do next."""
    folder = out.expanduser().resolve()
    make(folder)
    first = next(iter(exercises().values()))
    print(f"{folder}: two tracks, 100 points to earn in each. Read README.md.")
    print(f"Begin with {first.key}: tutorials/{first.page}.md, then {folder / first.file}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=typed(), description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("~/my-fsdp"), help="default: ~/my-fsdp"
    )
    main(parser.parse_args().folder)

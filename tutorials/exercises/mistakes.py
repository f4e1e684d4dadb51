"""Find the mistake: `make mistake M=3 DIR=~/my-fsdp`.

The first time, a file of the engine with one wrong line is put into the folder, and the symptom is
printed. After that, what is in the folder is graded. A mistake is found when the symptom is gone
and all exercises of that file are right. But for one line, the file is the answer of its exercises.
So who has not written them is told, and gets it with ARGS=--anyway.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minifsdp.sim.cli.files import folder_problem
from minifsdp.sim.cli.terminal import end_tidily
from tutorials.exercises import source
from tutorials.exercises.catalog import (
    HERE,
    PACKAGE,
    Check,
    exercises,
    exercises_alone,
    tomllib,
)
from tutorials.exercises.inside import Job
from tutorials.exercises.judge import equal, show, verdict
from tutorials.exercises.overlay import Layer
from tutorials.exercises.sandbox import Report, run_all


@dataclass(frozen=True)
class Mistake:
    """One wrong line, as mistakes.toml has it.

    Attributes:
        title: what a user would say is wrong.
        module: the file, as a path below minifsdp/ without its ending.
        original, replacement: the right line, and the wrong one.
        symptom: the function below that shows it.
    """

    key: str
    title: str
    module: str
    original: str
    replacement: str
    symptom: str

    @property
    def text(self) -> str:
        """The file with the wrong line."""
        right = (PACKAGE / f"{self.module}.py").read_text()
        if right.count(self.original) != 1:
            raise ValueError(f"mistake {self.key}: {self.original!r} is not once in {self.module}")
        return right.replace(self.original, self.replacement)

    @cached_property
    def check(self) -> Check:
        """Sees the symptom."""
        function = SYMPTOMS[self.symptom]
        return Check(function, RANKS[function], 15, lambda what, want, got: None)

    def file(self, folder: Path) -> Path:
        """Where the file is, in a student's folder."""
        return folder / "mistakes" / self.key / f"{self.module.rpartition('/')[2]}.py"


def mistakes() -> dict[str, Mistake]:
    """All of them, by key."""
    data = tomllib.loads((HERE / "mistakes.toml").read_text())
    return {entry["key"]: Mistake(**entry) for entry in data["mistake"]}


# -------------------------------------------------------------------------------------- symptoms


def training() -> Iterator[Any]:
    """Losses of four steps of SGD, beside DistributedDataParallel's."""
    from tutorials.exercises import parallel

    yield from parallel.train(4, optimizer=lambda params: torch.optim.SGD(params, lr=0.3))


def accumulation() -> Iterator[Any]:
    """The same, with three backwards to a step, two of them in no_sync()."""
    from tutorials.exercises import parallel

    def backward(model: torch.nn.Module, step: int) -> float:
        with model.no_sync():  # type: ignore[operator]
            losses = [parallel.one_backward(model, 10 * step + i) for i in range(2)]
        return sum(losses) + parallel.one_backward(model, 10 * step + 2)

    yield from parallel.train(3, backward=backward)


def clipping() -> Iterator[Any]:
    """Norms of the gradients, of replicas."""
    from minifsdp import ShardingStrategy
    from tutorials.exercises import observe, parallel

    def backward(model: torch.nn.Module, step: int) -> float:
        loss = parallel.one_backward(model, step)
        if observe.reference:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            norm = model.clip_grad_norm_(1.0)  # type: ignore[operator]
        norms.append(round(float(norm), 4))
        return loss

    norms: list[float] = []
    strategy = ShardingStrategy.NO_SHARD
    losses = [loss for _, loss in parallel.train(3, backward=backward, sharding_strategy=strategy)]
    for step, norm in enumerate(norms):
        yield f"norm of the gradients in step {step + 1}", norm
    yield "loss of step 3", round(losses[2], 4)


def one_idle_rank() -> Iterator[Any]:
    """One rank has no part in the loss, so that its gradient is zero."""
    import torch.distributed as dist

    from tutorials.exercises import parallel

    def backward(model: torch.nn.Module, step: int) -> float:
        loss = model(parallel.batch(step)).pow(2).mean() * dist.get_rank()
        loss.backward()
        return float(loss)

    yield from parallel.train(2, backward=backward)


def gpu() -> Iterator[Any]:
    """Five steps on a virtual GPU: time, memory and races."""
    from tutorials.exercises.virtual import train

    figures: list[dict[str, Any]] = []
    virtual = train(steps=5, each_step=lambda gpu: figures.append(gpu.report()))
    for step, found in enumerate(figures):
        yield f"units alive at once, step {step + 1}", found["peak unsharded units"]
    yield "MiB reserved at the end", round(figures[-1]["peak reserved"] / 2**20)
    yield "milliseconds of a step", round(1000 * figures[-1]["step"], 2)
    yield "of them exposed communication", round(1000 * figures[-1]["exposed communication"], 2)
    for i, race in enumerate(virtual.races()[:3]):
        yield f"race {i + 1}", str(race)


def offload() -> Iterator[Any]:
    """Two steps on a virtual GPU with CPU offload: races."""
    from minifsdp import CPUOffload
    from tutorials.exercises.virtual import train

    virtual = train(steps=2, cpu_offload=CPUOffload(True))
    yield "number of races", len(virtual.races())
    for i, race in enumerate(virtual.races()[:3]):
        yield f"race {i + 1}", str(race)


RANKS: dict[Callable[[], Iterator[Any]], int] = {
    training: 2, accumulation: 2, clipping: 2, one_idle_rank: 2, gpu: 1, offload: 1
}  # fmt: skip
SYMPTOMS = {function.__name__: function for function in RANKS}


# --------------------------------------------------------------------------------------- grading


def look(mistake: Mistake, checks: list[Check], file: Path) -> list[tuple[Report, Report]]:
    """What checks see with the reference, and with a file of the student's in its place."""
    layers = {mistake.module: Layer(file)}
    jobs = [Job(check, {}, None, 0) for check in checks]
    jobs += [Job(check, layers, file.parent, 0) for check in checks]
    reports = {(job.check, bool(job.layers)): report for job, report in run_all(jobs, 2)}
    return [(reports[check, False], reports[check, True]) for check in checks]


def table(expected: Report, found: Report) -> list[str]:
    """What was seen beside what is right, a line each: of the rank that differs most, or the errors
    of all ranks."""
    lines, errors = [], [found.ended] * bool(found.ended)
    for rank, (want, got) in enumerate(zip(expected.ranks, found.ranks, strict=True)):
        seen = {entry.what: entry.value for entry in got or []}
        errors += [f"rank {rank}: {seen['']['message']}"] if "" in seen else []
        rows = []
        for entry in want or []:
            value = seen.pop(entry.what, "nothing")
            differs = "" if equal(entry.value, value) else "   <--"
            rows.append(f"{entry.what:<40} {_short(entry.value):>20} {_short(value):>20}{differs}")
        rows += [f"{what}: {value}" for what, value in seen.items() if what]
        if sum("<--" in row for row in rows) > sum("<--" in line for line in lines) or not lines:
            lines = rows
    return errors or [f"{'':<40} {'right':>20} {'with the mistake':>20}", *lines]


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.dim():
        return f"[{show(float(value.flatten()[0]))}, ...]"
    return show(float(value) if isinstance(value, torch.Tensor) else value)


def unwritten(mistake: Mistake, folder: Path) -> list[str]:
    """The exercises whose answers a mistake's file has, and which the student has not written."""
    here = [e for e in exercises_alone(2) if e.module == mistake.module]
    try:
        return [e.key for e in here if not source.is_done(e, folder / e.file)]
    except source.Complaint:  # there is no such file, or it cannot be read
        return [exercise.key for exercise in here]


def main(key: str, folder: str, anyway: str = "") -> int:
    """Hand out a mistake, or grade what is there."""
    end_tidily()
    torch.set_num_threads(1)
    every = mistakes()
    if key not in every:
        print("make mistake M=..., one of:")
        print("\n".join(f"  {mistake.key:>2}  {mistake.title}" for mistake in every.values()))
        return 2
    mistake, student = every[key], Path(folder).expanduser().resolve()
    file = mistake.file(student)
    if not file.exists():
        if anyway != "--anyway" and (keys := unwritten(mistake, student)):
            print(f"{mistake.title}\n\nIts file has the answers of {', '.join(keys)}. You have not")
            print("written them yet. Write them first, or say the same with ARGS=--anyway.")
            return 1
        if problem := folder_problem(file.parent):
            print(f"{file} cannot be written: {problem}", file=sys.stderr)
            return 2
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(mistake.text)
    expected, found = look(mistake, [mistake.check], file)[0]
    seen = verdict(mistake.check, expected, found)
    if seen.state == "inconclusive":
        print(f"Inconclusive, run again: {seen.message}")
        return 1
    if seen.state == "wrong":
        print(f"{mistake.title}\n")
        print("\n".join(table(expected, found)))
        print(f"\nWhich line of {file} is wrong? Mend it, and say the same command again.")
        return 1
    here = [exercise for exercise in exercises().values() if exercise.module == mistake.module]
    checks = [check for exercise in here for check in exercise.checks]
    for check, (want, got) in zip(checks, look(mistake, checks, file), strict=True):
        seen = verdict(check, want, got)
        if seen.state != "right":
            print(f"The symptom is gone, but something else is {seen.state}: {seen.message}")
            return 1
    print("Found: the symptom is gone, and everything else is right.")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

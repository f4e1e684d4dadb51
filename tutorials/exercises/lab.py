"""Run a lab: `make lab DIR=~/my-fsdp LAB=bytes_limiter`, or all of them without LAB.

A lab is open-ended: what counts is its figure, and that nothing else got worse. The files of the
student's folder labs/<key>/ are laid over the engine's files of the same name: what they define
replaces what is there. The same is measured with the default engine, with our solution and with the
student's, so that no figure depends on the machine.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from minifsdp.sim.cli.terminal import end_tidily, progress
from tutorials.exercises.catalog import HERE, Check, tomllib
from tutorials.exercises.inside import Job
from tutorials.exercises.judge import verdict
from tutorials.exercises.labs.measure import FIGURE
from tutorials.exercises.overlay import Layer
from tutorials.exercises.sandbox import Report, processes_at_a_time, run_all

SOLUTIONS = HERE / "labs" / "solutions"


@dataclass(frozen=True, eq=False)
class Lab:
    """One lab.

    Attributes:
        key: the name of its folder.
        title: what is to be reached.
        files: what may be replaced: files of the engine, as paths below minifsdp/ without ending.
        figure, unit: what is measured. Less is better.
        page: the tutorial's name.
        checks: what is looked at; one of them yields the figure.
    """

    key: str
    title: str
    files: tuple[str, ...]
    figure: str
    unit: str
    page: str
    checks: tuple[Check, ...]

    def layers(self, folder: Path) -> dict[str, Layer]:
        """The files that ``folder`` has for this lab."""
        files = {name: folder / f"{name.rpartition('/')[2]}.py" for name in self.files}
        return {name: Layer(file) for name, file in files.items() if file.is_file()}


@cache
def labs() -> dict[str, Lab]:
    """All labs by key."""
    found = {}
    for entry in tomllib.loads((HERE / "labs.toml").read_text())["lab"]:
        module = importlib.import_module(f"tutorials.exercises.labs.measure.{entry['key']}")
        files = tuple(entry.pop("files"))
        found[entry["key"]] = Lab(**entry, files=files, checks=tuple(module.CHECKS))
    return found


class Outcome(NamedTuple):
    """What came of one solution of a lab.

    Attributes:
        wrong: what is wrong with it; empty if it is right.
        inconclusive: nobody knows, and ``wrong`` says why.
        figure: None if it was not reached.
        default: the figure of the default engine; None if that is what was inconclusive.
        reference: the figure to beat, which is our solution's; None where that is not there.
    """

    lab: Lab
    wrong: str
    inconclusive: bool
    figure: float | None
    default: float | None
    reference: float | None

    @property
    def better(self) -> bool:
        """Whether it is right, and better than the default engine."""
        if self.wrong or self.figure is None or self.default is None:
            return False
        return self.figure < self.default * 0.999

    @property
    def reached(self) -> bool:
        """Whether it is right, and as good as our solution."""
        if not self.better or self.figure is None:
            return False
        return self.reference is None or self.figure <= self.reference * 1.001


def run(
    cases: Sequence[tuple[Lab, Path]],
    seed: int = 0,
    patience: float = 1,
    workers: int | None = None,
) -> list[Outcome]:
    """Measure solutions, each in a folder with the files of one lab.

    Args:
        seed: of the random numbers.
        patience: stretches time limits.
        workers: processes at a time.
    """
    chosen = list(dict.fromkeys(lab for lab, _ in cases))
    folders: list[tuple[Lab, Path | None]] = [(lab, None) for lab in chosen]
    folders += [(lab, SOLUTIONS / lab.key) for lab in chosen if (SOLUTIONS / lab.key).is_dir()]
    ours = len(folders)
    folders += cases
    jobs = {
        Job(check, lab.layers(folder) if folder else {}, folder, seed): i
        for i, (lab, folder) in enumerate(folders)
        for check in lab.checks
    }
    reports: list[dict[Check, Report]] = [{} for _ in folders]
    ended = run_all(jobs, workers or processes_at_a_time(), patience)
    for number, (job, report) in enumerate(ended, 1):
        progress(f"{number} of {len(jobs)} measurements")
        reports[jobs[job]][job.check] = report
    defaults = {lab: reports[i] for i, lab in enumerate(chosen)}
    references = {lab: reports[i] for i, (lab, _) in enumerate(folders[:ours]) if i >= len(chosen)}
    return [
        _outcome(lab, reports[ours + i], defaults[lab], references.get(lab))
        for i, (lab, _) in enumerate(cases)
    ]


def _outcome(
    lab: Lab,
    found: dict[Check, Report],
    default: dict[Check, Report],
    reference: dict[Check, Report] | None,
) -> Outcome:
    verdicts = [
        verdict(check, _without_figure(default[check]), _without_figure(found[check]))
        for check in lab.checks
    ]
    usual = _figure(default.values())
    assert usual is not None or any(report.inconclusive for report in default.values()), lab.key
    to_beat = None if reference is None else _figure(reference.values())
    by_state = {v.state: v.message for v in reversed(verdicts)}  # the first of each
    wrong = by_state.get("wrong") or by_state.get("inconclusive", "")
    unknown = "wrong" not in by_state and "inconclusive" in by_state
    return Outcome(lab, wrong, unknown, _figure(found.values()), usual, to_beat)


def _without_figure(report: Report) -> Report:
    ranks = [seen and [s for s in seen if s.what != FIGURE] for seen in report.ranks]
    return report._replace(ranks=ranks)


def _figure(reports: Iterable[Report]) -> float | None:
    """The largest, if several ranks have one."""
    seen = [entry for report in reports for rank in report.ranks for entry in rank or ()]
    values = [entry.value for entry in seen if entry.what == FIGURE]
    return max(values, default=None)


def show(outcome: Outcome) -> str:
    """An outcome for a terminal."""
    lab, wrong, unknown, figure, default, reference = outcome
    lines = [f"{lab.key}: {lab.title}", f"  {lab.figure}, {lab.unit} (less is better)"]
    for name, value in (("default engine", default), ("to beat", reference), ("yours", figure)):
        if value is not None:
            change = "" if default is None else f"   {value / default - 1:+.1%}"
            lines.append(f"    {name:<16}{value:>10,.2f}{change}")
    if unknown:
        lines.append(f"  ? inconclusive, run again: {wrong}")
    elif wrong:
        lines.append(f"  ✗ {wrong}")
    elif outcome.reached:
        beaten = reference is not None and figure is not None and figure < reference * 0.999
        lines.append(f"  ✓ right, and the figure to beat is {'beaten' if beaten else 'reached'}")
    elif outcome.better:
        lines.append("  ✓ right, and better than the default; more is possible")
    else:
        lines.append(f"  · right, and no better than the default. Read tutorials/{lab.page}.md.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lab", description=__doc__)
    parser.add_argument("folder", type=Path, help="the student's folder, as make student makes it")
    parser.add_argument("--lab", default="", help="such as bytes_limiter; all of them if empty")
    parser.add_argument("--patience", type=float, default=1, help="stretch all time limits")
    options = parser.parse_args()
    end_tidily()
    torch.set_num_threads(1)
    if options.lab and options.lab not in labs():
        print(f"there is no lab {options.lab!r}; there are: {', '.join(labs())}", file=sys.stderr)
        return 2
    folder = options.folder.expanduser().resolve() / "labs"
    chosen = [lab for lab in labs().values() if options.lab in ("", lab.key)]
    cases = [(lab, folder / lab.key) for lab in chosen if lab.layers(folder / lab.key)]
    if not cases:
        print(f"{folder} has no file of {options.lab or 'a lab'}; make student makes them.")
        return 2
    outcomes = run(cases, patience=options.patience)
    progress("")
    print("\n\n".join(map(show, outcomes)))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

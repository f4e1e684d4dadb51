"""All runs that are asked for at once, and what is printed and written of them."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minifsdp.sim.cli.against import table
from minifsdp.sim.cli.commands import OTHERS
from minifsdp.sim.cli.options import Row
from minifsdp.sim.cli.run import measure, no_run
from minifsdp.sim.cli.terminal import Progress, columns
from minifsdp.sim.cli.values import ImpossibleError
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.words import in_words, page
from minifsdp.sim.memory.snapshots import Peak, peak, read
from minifsdp.sim.training.plain import tried
from minifsdp.sim.training.presets import MODELS, find
from minifsdp.sim.views.spans import text
from minifsdp.sim.views.timeline import svg
from minifsdp.sim.views.trace import memory_snapshot


def run(options: argparse.Namespace, rows: list[Row], progress: Progress) -> int:
    """Make all runs, print and write what is asked for. Returns the exit status: 1 if none fits.

    Args:
        rows: what is special about each run, and its settings; see :func:`options.grid`.

    Raises:
        ValueError: a model cannot be run, or no combination of settings can.
    """
    _try_models([its for _, its in rows])
    runs: list[tuple[dict[str, str], argparse.Namespace, dict[str, Any], VirtualGpu | None]] = []
    impossible: list[ImpossibleError] = []
    for chosen, its in rows:
        name = _name(chosen)

        def tell(what: str, name: str = name) -> None:
            progress(f"{name}: {what}" if name else what)

        try:
            figures, gpu = measure(its, progress=tell)
        except ImpossibleError as error:
            impossible.append(error)
            figures, gpu = no_run(error), None
        if options.races and gpu is not None:
            figures["races"] = [str(race) for race in gpu.races()]
        if options.against and gpu is not None:
            here = memory_snapshot(gpu.allocator, gpu.storages.frames or {})
            found = {"file": peak(read(options.against)), "run": peak(here)}
            figures["against"] = {where: its._asdict() for where, its in found.items()}
        runs.append((chosen, its, figures, gpu))
    progress("")
    if len(impossible) == len(rows):
        raise impossible[0]
    if options.json:
        print(json.dumps([{**c, "settings": _settings(its), **f} for c, its, f, _ in runs]))
    elif options.sweep:
        _table([(chosen, figures) for chosen, _, figures, _ in runs])
    else:
        _show(*runs[0][2:])
    for chosen, _, figures, _ in [] if options.json else runs:
        for race in figures.get("races", []) or ["no races"] * ("races" in figures):
            print(f"{_name(chosen)}: {race}" if chosen else race)
    if options.against and "against" in runs[0][2] and not options.json:
        print("\n" + table(*(Peak(**its) for its in runs[0][2]["against"].values())))
    _write_files(options, [(chosen, figures, gpu) for chosen, _, figures, gpu in runs if gpu])
    return 0 if any(figures["fits"] for _, _, figures, _ in runs) else 1


def _try_models(rows: list[argparse.Namespace]) -> None:
    """Find all models, and run those once that are not presets: before the first long run."""
    asked = dict.fromkeys((its.model, its.config, its.input, its.seq) for its in rows)
    for model, config, shape, length in asked:  # without other sizes, which are a preset's
        job = find(model, config, shape)
        if model not in MODELS and not config:
            tried(job, model, shape, length)
        if job.note:
            print(f"minifsdp: {job.note}", file=sys.stderr)


def _name(chosen: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in OTHERS}


def _show(figures: dict[str, Any], gpu: VirtualGpu | None) -> None:
    if gpu is not None:
        print(text(gpu.tape, max(columns(otherwise=110) - 10, 30)), end="\n\n")
    print(page(figures))


def _write_files(
    options: argparse.Namespace, runs: list[tuple[dict[str, str], dict[str, Any], VirtualGpu]]
) -> None:
    """A picture of all runs that fit, and the last one's page, trace and snapshot."""
    if not runs:
        return
    (*_, figures, gpu) = runs[-1]
    around = gpu.cluster
    what = f"{options.model}, {around.nodes} x {around.gpus_per_node} {around.gpu.name}"
    titles = [f"{what}, {_name(chosen)}".removesuffix(", ") for chosen, _, _ in runs]
    tapes = {title: its.tape for title, (*_, its) in zip(titles, runs, strict=True)}
    written: dict[str, Callable[[str], object]] = {
        "svg": lambda path: Path(path).write_text(svg(tapes)),
        "html": lambda path: gpu.html(path, titles[-1], figures),
        "trace": gpu.trace,
        "snapshot": gpu.snapshot,
    }
    for option, write in written.items():
        if path := getattr(options, option):
            try:
                write(path)
            except OSError as error:  # which does not always name the file
                raise ValueError(f"--{option}: cannot write {path!r}: {error.strerror}") from error


FIGURES = {
    "step": "step",
    "MFU": "MFU",
    "exposed": "exposed communication",
    "idle": "idle",
    "allocated": "peak allocated",
    "reserved": "peak reserved",
    "binds": "binds",
}
"""The columns of a table. With two sweeps it fits into 80 characters."""


def _table(rows: list[tuple[dict[str, str], dict[str, Any]]]) -> None:
    """A row for each run, no wider than what is in it."""
    names = list(rows[0][0])
    lines = [[*names, *FIGURES]]
    for chosen, figures in rows:
        words = in_words(figures)
        shown = [words[name] for name in FIGURES.values()] if figures["fits"] else ["does not fit"]
        if "impossible" in figures:
            shown = [f"not possible: {figures['why']}"]
        lines.append([*chosen.values(), *shown])
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    for line in lines:
        print("  ".join(f"{word:>{width}}" for word, width in zip(line, widths, strict=False)))

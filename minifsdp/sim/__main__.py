"""Run a training step on a virtual cluster, from the shell::

    python -m minifsdp.sim --model t5-500m --nodes 2 --gpus 8 --gpu a100-40 --batch 16 --seq 128
    python -m minifsdp.sim --model gpt-1.3b --sweep limit=none,1,2,3
    python -m minifsdp.sim --model gpt-1.3b --batch 4 --svg step.svg --html step.html
    python -m minifsdp.sim plan --model gpt-7b --nodes 2 --gpu a100-80 --batch 2

It says whether it fits, how fast it is and what binds; ``plan`` (plan.py), which settings to use.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.plan import plan
from minifsdp.sim.run import add_settings, measure
from minifsdp.sim.spans import text
from minifsdp.sim.timeline import svg
from minifsdp.sim.words import in_words, page


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> Parser:
    """The settings of a run, and what to do with it."""
    p = Parser(prog="python -m minifsdp.sim", description="A training step on a virtual cluster.")
    add_settings(p)
    p.add_argument("--sweep", metavar="NAME=A,B,...", help="a row for each value of a setting")
    p.add_argument("--svg", metavar="FILE", help="draw the step")
    p.add_argument("--html", metavar="FILE", help="the step, to look around in with a browser")
    p.add_argument("--trace", metavar="FILE", help="for ui.perfetto.dev")
    p.add_argument("--snapshot", metavar="FILE", help="for pytorch.org/memory_viz")
    p.add_argument(
        "--races",
        action="store_true",
        help="print waits that are missing (races.py), or that there are none; "
        "the exit status does not change",
    )
    p.add_argument("--json", action="store_true", help="print figures only")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where nothing fits; 2 where an option makes no sense."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["plan"]:
            p = Parser(prog="python -m minifsdp.sim plan", description=plan.__doc__)
            return plan(p, given[1:], progress)
        return run(parser().parse_args(given))
    except ValueError as error:
        progress("")
        print(f"minifsdp.sim: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """One run, or one for each value of a sweep."""
    name, _, values = (options.sweep or "").partition("=")
    if options.sweep and (not values or name not in vars(options)):
        raise ValueError(
            f"--sweep is NAME=A,B,... with the name of an option, not {options.sweep!r}"
        )
    runs = []
    for value in values.split(",") if options.sweep else [""]:
        its = argparse.Namespace(**vars(options))
        if value:  # as if it had been written there
            setattr(its, name, getattr(parser().parse_args([f"--{name}", value]), name))

        def tell(what: str, value: str = value) -> None:
            progress(f"{name} {value}: {what}" if value else what)

        figures, gpu = measure(its, progress=tell)
        if options.races and gpu is not None:
            figures["races"] = [str(race) for race in gpu.races()]
        runs.append((value, figures, gpu))
    progress("")
    if options.json:
        print(json.dumps([{name or "run": value, **figures} for value, figures, _ in runs]))
    elif options.sweep:
        _table(name, [(value, figures) for value, figures, _ in runs])
    else:
        (_, figures, gpu) = runs[0]
        if gpu is not None:
            print(text(gpu.tape), end="\n\n")
        print(page(figures))
    for value, figures, _ in [] if options.json else runs:
        for race in figures.get("races", []) or ["no races"] * ("races" in figures):
            print(f"{name} {value}: {race}" if value else race)
    what = f"{options.model}, {options.nodes} x {options.gpus} {options.gpu}"
    titles = (f"{what}, {name} {value}".removesuffix(",  ") for value, *_ in runs)
    fitting = [(title, f, gpu) for title, (_, f, gpu) in zip(titles, runs, strict=True) if gpu]
    if fitting:
        _write_files(options, fitting)
    return 0 if any(figures["fits"] for _, figures, _ in runs) else 1


def progress(what: str) -> None:
    """Over the last such line, if somebody is looking; nothing wipes it."""
    if sys.stderr.isatty():
        print(f"\r{what}{' ...' * bool(what)}\x1b[K", end="", file=sys.stderr, flush=True)


def _write_files(
    options: argparse.Namespace, runs: list[tuple[str, dict[str, Any], VirtualGpu]]
) -> None:
    """A picture of all runs that fit, and the last one's page, trace and snapshot."""
    title, figures, gpu = runs[-1]
    if options.svg:
        Path(options.svg).write_text(svg({title: its.tape for title, _, its in runs}))
    if options.html:
        gpu.html(options.html, title, figures)
    if options.trace:
        gpu.trace(options.trace)
    if options.snapshot:
        gpu.snapshot(options.snapshot)


def _table(name: str, rows: list[tuple[str, dict[str, Any]]]) -> None:
    columns = ["step", "MFU", "exposed communication", "idle", "peak allocated", "peak reserved"]
    columns.append("binds")
    print(f"{name:>12} " + "".join(f"{column:>23}" for column in columns))
    for value, figures in rows:
        words = in_words(figures)
        shown = [words[column] for column in columns] if figures["fits"] else ["does not fit"]
        print(f"{value:>12} " + "".join(f"{word:>23}" for word in shown))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*NumPy.*")
    sys.exit(main())

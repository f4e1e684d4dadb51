"""Run a training step on a virtual cluster, from the shell::

    python -m minifsdp.sim --model t5-500m --nodes 2 --gpus 8 --gpu a100-40 --batch 16 --seq 128
    python -m minifsdp.sim --model gpt-1.3b --sweep limit=none,1,2,3
    python -m minifsdp.sim --model gpt-1.3b --sweep engine=fsdp1,fsdp2 --sweep batch=1,2,4
    python -m minifsdp.sim --model gpt-1.3b --batch 4 --svg step.svg --html step.html
    python -m minifsdp.sim plan --model gpt-7b --nodes 2 --gpu a100-80 --batch 2

It says whether it fits, how fast it is and what binds; ``plan`` (cli/plan.py) says which settings
to use.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minifsdp.sim.cli.conflicts import check
from minifsdp.sim.cli.options import Parser, add_settings, grid
from minifsdp.sim.cli.plan import plan
from minifsdp.sim.cli.run import measure
from minifsdp.sim.cli.values import check_files
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.words import in_words, page
from minifsdp.sim.training.plain import tried
from minifsdp.sim.training.presets import MODELS, find
from minifsdp.sim.views.spans import text
from minifsdp.sim.views.timeline import svg

FILES = {
    "svg": "draw the step",
    "html": "the step, to look around in with a browser",
    "trace": "for ui.perfetto.dev",
    "snapshot": "for pytorch.org/memory_viz",
}
"""What can be written, by option."""


def parser() -> Parser:
    """The settings of a run, and what to do with it."""
    p = Parser(prog="python -m minifsdp.sim", description="A training step on a virtual cluster.")
    add_settings(p)
    p.add_argument(
        "--sweep",
        metavar="NAME=A,B,...",
        action="append",
        default=[],
        help="a row for each value of a setting; with several, for each combination",
    )
    for name, what in FILES.items():
        p.add_argument(f"--{name}", metavar="FILE", help=what)
    p.add_argument(
        "--races",
        action="store_true",
        help="print waits that are missing (races.py), or that there are none; "
        "the exit status does not change",
    )
    p.add_argument("--json", action="store_true", help="print settings and figures only")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where nothing fits; 2 where an option makes no sense."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return search(given[1:]) if given[:1] == ["plan"] else run(given)
    except (ValueError, OSError) as error:
        progress("")
        print(f"minifsdp.sim: {error}", file=sys.stderr)
        return 2


def search(given: list[str]) -> int:
    """``plan``: which settings are the best ones."""
    p = Parser(prog="python -m minifsdp.sim plan", description="Search for the best settings.")
    add_settings(p)
    check(p.parse_args(given))
    return plan(p, given, progress)


def run(given: list[str]) -> int:
    """One run, or one for each combination of the values that are swept."""
    p = parser()
    options = p.parse_args(given)
    check_files({name: getattr(options, name) for name in FILES})
    rows = grid(p, options, options.sweep)
    _try_models([its for _, its in rows])
    runs = []
    for chosen, its in rows:
        name = _name(chosen)

        def tell(what: str, name: str = name) -> None:
            progress(f"{name}: {what}" if name else what)

        figures, gpu = measure(its, progress=tell)
        if options.races and gpu is not None:
            figures["races"] = [str(race) for race in gpu.races()]
        runs.append((chosen, its, figures, gpu))
    progress("")
    if options.json:
        print(json.dumps([{**c, "settings": _settings(its), **f} for c, its, f, _ in runs]))
    elif options.sweep:
        _table([(chosen, figures) for chosen, _, figures, _ in runs])
    else:
        _show(*runs[0][2:])
    for chosen, _, figures, _ in [] if options.json else runs:
        for race in figures.get("races", []) or ["no races"] * ("races" in figures):
            print(f"{_name(chosen)}: {race}" if chosen else race)
    _write_files(options, [(chosen, figures, gpu) for chosen, _, figures, gpu in runs if gpu])
    return 0 if any(figures["fits"] for _, _, figures, _ in runs) else 1


def _try_models(rows: list[argparse.Namespace]) -> None:
    """Find all models, and run those once that are not presets: before the first long run."""
    asked = dict.fromkeys((its.model, its.config, its.input, its.seq) for its in rows)
    for model, config, shape, length in asked:
        job = find(model, config, shape)
        if model not in MODELS and not config:
            tried(job, model, shape, length)
        if job.note:
            print(f"minifsdp.sim: {job.note}", file=sys.stderr)


def _name(chosen: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    others = {*FILES, "sweep", "races", "json"}
    return {name: value for name, value in vars(options).items() if name not in others}


def _show(figures: dict[str, Any], gpu: VirtualGpu | None) -> None:
    if gpu is not None:
        print(text(gpu.tape), end="\n\n")
    print(page(figures))


def progress(what: str) -> None:
    """Over the last such line, if somebody is looking; nothing wipes it."""
    if sys.stderr.isatty():
        print(f"\r{what}{' ...' * bool(what)}\x1b[K", end="", file=sys.stderr, flush=True)


def _write_files(
    options: argparse.Namespace, runs: list[tuple[dict[str, str], dict[str, Any], VirtualGpu]]
) -> None:
    """A picture of all runs that fit, and the last one's page, trace and snapshot."""
    if not runs:
        return
    what = f"{options.model}, {options.nodes} x {options.gpus} {options.gpu}"
    titles = [f"{what}, {_name(chosen)}".removesuffix(", ") for chosen, _, _ in runs]
    (*_, figures, gpu) = runs[-1]
    if options.svg:
        tapes = {title: its.tape for title, (*_, its) in zip(titles, runs, strict=True)}
        Path(options.svg).write_text(svg(tapes))
    if options.html:
        gpu.html(options.html, titles[-1], figures)
    if options.trace:
        gpu.trace(options.trace)
    if options.snapshot:
        gpu.snapshot(options.snapshot)


def _table(rows: list[tuple[dict[str, str], dict[str, Any]]]) -> None:
    columns = ["step", "MFU", "exposed communication", "idle"]
    columns += ["peak allocated", "peak reserved", "binds"]
    names = list(rows[0][0])
    widths = [max(12, len(n), *(len(chosen[n]) for chosen, _ in rows)) for n in names]

    def line(values: list[str], shown: Sequence[str]) -> None:
        left = " ".join(f"{v:>{width}}" for v, width in zip(values, widths, strict=True))
        print(f"{left} " + "".join(f"{word:>23}" for word in shown))

    line(names, columns)
    for chosen, figures in rows:
        words = in_words(figures)
        shown = [words[column] for column in columns] if figures["fits"] else ["does not fit"]
        line(list(chosen.values()), shown)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*NumPy.*")
    sys.exit(main())

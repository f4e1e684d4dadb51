"""What a run and ``calibrate`` take besides settings: what to write and what to read."""

import argparse

from minifsdp.sim.cli.values import one_of, whole
from minifsdp.sim.hardware.gpus import GPUS

FILES = {
    "svg": "draw the step",
    "html": "the step, to look around in with a browser",
    "trace": "for ui.perfetto.dev",
    "snapshot": "for pytorch.org/memory_viz",
}
"""What can be written, by option."""
OTHERS = (*FILES, "sweep", "races", "json", "against")
"""Options that are not settings of a run."""


def add_outputs(p: argparse.ArgumentParser) -> None:
    """What to do with runs."""
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
        "--against",
        metavar="FILE",
        help="compare memory with a snapshot, of torch.cuda.memory._dump_snapshot or --snapshot",
    )
    p.add_argument(
        "--races",
        action="store_true",
        help="print waits that are missing (races.py), or that there are none; "
        "the exit status does not change",
    )
    add_json(p, "print one JSON document: a list with the settings and figures of each run")


def add_json(p: argparse.ArgumentParser, what: str) -> None:
    """For programs that read what is printed; progress goes to stderr in any case."""
    p.add_argument("--json", action="store_true", help=what)


def add_calibrate(p: argparse.ArgumentParser) -> None:
    """What to measure, or to read instead, and where to write."""
    p.add_argument(
        "-o", "--output", default="cluster.json", metavar="FILE", help="default: cluster.json"
    )
    ranks = "processes to measure with (default: one for each GPU; without GPUs 2)"
    p.add_argument("--ranks", type=whole(1024), metavar="VALUE", help=ranks)
    p.add_argument(
        "--profile",
        metavar="FILE",
        help="measure nothing; read a trace that torch.profiler has exported, with record_shapes",
    )
    like = "with --profile: whose constants to take for what is not in there: " + ", ".join(GPUS)
    p.add_argument("--gpu", type=one_of(*GPUS), metavar="VALUE", help=like)

"""Run a training step on a virtual cluster, from the shell::

    python -m minifsdp.sim --model t5-500m --nodes 2 --gpus 8 --gpu a100-40 --batch 16 --seq 128
    python -m minifsdp.sim --model gpt-1.3b --sweep limit=none,1,2,3
    python -m minifsdp.sim --model gpt-1.3b --sweep engine=fsdp1,fsdp2 --sweep batch=1,2,4
    python -m minifsdp.sim --model gpt-1.3b --batch 4 --svg step.svg --html step.html
    python -m minifsdp.sim plan --model gpt-7b --nodes 2 --gpu a100-80 --batch 2
    python -m minifsdp.sim calibrate -o cluster.json
    python -m minifsdp.sim cluster --gpu h100 --nodes 4 > cluster.json

It says whether it fits, how fast it is and what binds. ``plan`` (cli/plan.py) says which settings
to use, ``calibrate`` (cli/calibrate.py) measures the constants of one's own machine, and
``cluster`` (cli/cluster.py) prints those of a preset, to be edited.

torch takes seconds to import. So it is imported when the options are known to make sense, which is
why some imports below are in functions.
"""

import sys
import warnings
from collections.abc import Sequence

from minifsdp.sim.cli.commands import FILES, add_calibrate, add_outputs
from minifsdp.sim.cli.conflicts import check, check_against, check_calibrate, check_machine
from minifsdp.sim.cli.options import Parser, add_machine, add_settings, grid
from minifsdp.sim.cli.progress import progress
from minifsdp.sim.cli.values import check_files


def parser() -> Parser:
    """The settings of a run, and what to do with it."""
    p = Parser(prog="python -m minifsdp.sim", description="A training step on a virtual cluster.")
    add_settings(p)
    add_outputs(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where nothing fits; 2 where an option makes no sense."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["plan"]:
            return _plan(given[1:])
        if given[:1] == ["calibrate"]:
            return _calibrate(given[1:])
        if given[:1] == ["cluster"]:
            return _cluster(given[1:])
        return _run(given)
    except (ValueError, OSError) as error:
        progress("")
        print(f"minifsdp.sim: {error}", file=sys.stderr)
        return 2


def _run(given: list[str]) -> int:
    """One run, or one for each combination of the values that are swept."""
    p = parser()
    options = p.parse_args(given)
    check_files({name: getattr(options, name) for name in FILES})
    check_against(options)
    rows = grid(p, options, options.sweep)
    from minifsdp.sim.cli.runs import run

    return run(options, rows, progress)


def _plan(given: list[str]) -> int:
    """Which settings are the best ones."""
    p = Parser(prog="python -m minifsdp.sim plan", description="Search for the best settings.")
    add_settings(p)
    check(p.parse_args(given))
    from minifsdp.sim.cli.plan import plan

    return plan(p, given, progress)


def _calibrate(given: list[str]) -> int:
    """The constants of this machine, or of one that was profiled."""
    p = Parser(
        prog="python -m minifsdp.sim calibrate",
        description="Measure this machine, and write its constants to a file for --cluster.",
    )
    add_calibrate(p)
    options = p.parse_args(given)
    check_files({"output": options.output})
    check_calibrate(options)
    from minifsdp.sim.cli.calibrate import calibrate

    return calibrate(options, progress)


def _cluster(given: list[str]) -> int:
    """The constants of a preset, in a file for --cluster."""
    p = Parser(
        prog="python -m minifsdp.sim cluster",
        description="Print the constants of a cluster, to be edited, for --cluster.",
    )
    add_machine(p)
    options = p.parse_args(given)
    check_machine(options)
    from minifsdp.sim.cli.cluster import cluster

    return cluster(options)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*NumPy.*")
    sys.exit(main())

"""Run a training step on a virtual cluster, from the shell::

    minifsdp sim --model t5-500m --nodes 2 --gpus 8 --gpu a100-40 --batch 16 --seq 128
    minifsdp sim --model gpt-1.3b --sweep limit=none,1,2,3
    minifsdp sim --model gpt-1.3b --sweep engine=fsdp1,fsdp2 --sweep batch=1,2,4
    minifsdp sim --model gpt-1.3b --batch 4 --svg step.svg --html step.html
    minifsdp plan --model gpt-7b --nodes 2 --gpu a100-80 --batch 2
    minifsdp calibrate -o cluster.json
    minifsdp cluster --gpu h100 --nodes 4 > cluster.json

``sim`` says whether it fits, how fast it is and what binds. ``plan`` (cli/plan.py) says which
settings to use, ``calibrate`` (cli/calibrate.py) measures the constants of one's own machine, and
``cluster`` (cli/cluster.py) prints those of a preset, to be edited.
Where the package is not installed, ``python -m minifsdp.sim`` stands for ``minifsdp sim``, and
``python -m minifsdp.sim plan`` for ``minifsdp plan``.

torch takes seconds to import. So it is imported when the options are known to make sense, which is
why some imports below are in functions.
"""

import sys
from collections.abc import Sequence

from minifsdp.sim.cli.commands import FILES, add_calibrate, add_json, add_outputs
from minifsdp.sim.cli.conflicts import check, check_against, check_calibrate, check_machine
from minifsdp.sim.cli.files import check_files
from minifsdp.sim.cli.options import COMMANDS, Parser, add_machine, add_settings, grid
from minifsdp.sim.cli.terminal import begin, end_tidily, progress, reader_has_left


def parser(prog: str = "minifsdp sim") -> Parser:
    """The settings of a run, and what to do with it."""
    p = Parser(prog=prog, description="A training step on a virtual cluster.")
    add_settings(p)
    add_outputs(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """What ``python -m minifsdp.sim`` does; returns the exit status, as :func:`command` does."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in COMMANDS:
        return command(given[0], given[1:], f"python -m minifsdp.sim {given[0]}")
    return command("sim", given, "python -m minifsdp.sim")


def command(name: str, given: Sequence[str], prog: str) -> int:
    """``sim``, ``plan``, ``calibrate`` or ``cluster``.

    Args:
        given: what comes after it.
        prog: what was typed to get here, for its help.

    Returns:
        The exit status: 0; 1 where nothing fits; 2 where an option makes no sense; 141, as shells
        have it, where whoever reads has left, as ``| head`` does.
    """
    try:
        known = {"plan": _plan, "calibrate": _calibrate, "cluster": _cluster}
        status = known.get(name, _run)(given, prog)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return reader_has_left()
    except (ValueError, OSError) as error:
        progress("")
        print(f"minifsdp: {error}", file=sys.stderr)
        return 2


def _run(given: Sequence[str], prog: str) -> int:
    """One run, or one for each combination of the values that are swept."""
    p = parser(prog)
    options = p.parse_args(given)
    check_files({name: getattr(options, name) for name in FILES})
    check_against(options)
    rows = grid(p, options, options.sweep)
    from minifsdp.sim.cli.runs import run

    return run(options, rows, progress)


def _plan(given: Sequence[str], prog: str) -> int:
    """Which settings are the best ones."""
    p = Parser(prog=prog, description="Search for the best settings; those given stay as they are.")
    add_settings(p)
    add_json(p, "print one JSON document: the best settings, its figures, and what else was tried")
    check(p.parse_args(given))
    from minifsdp.sim.cli.plan import plan

    return plan(p, given, progress)


def _calibrate(given: Sequence[str], prog: str) -> int:
    """The constants of this machine, or of one that was profiled."""
    p = Parser(
        prog=prog,
        description="Measure this machine, and write its constants to a file for --cluster.",
    )
    add_calibrate(p)
    add_json(p, "print one JSON document: the device, what was measured, and what was not")
    options = p.parse_args(given)
    check_files({"output": options.output})
    check_calibrate(options)
    from minifsdp.sim.cli.calibrate import calibrate

    end_tidily()  # it starts processes
    return calibrate(options, progress)


def _cluster(given: Sequence[str], prog: str) -> int:
    """The constants of a preset, in a file for --cluster."""
    p = Parser(
        prog=prog,
        description="Print the constants of a cluster, to be edited, for --cluster.",
    )
    add_machine(p)
    options = p.parse_args(given)
    check_machine(options)
    from minifsdp.sim.cli.cluster import cluster

    return cluster(options)


if __name__ == "__main__":
    begin()
    sys.exit(main())

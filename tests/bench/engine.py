"""minifsdp against PyTorch's DDP, FSDP1 and FSDP2, on this machine: `make bench`.

All contenders train the same model on the same data in the same processes and take turns, so that a
noisy machine disturbs all alike: **only ratios of one run mean anything**. Their losses have to
agree. For each of them the table has the time of a step, alone and by what computing takes without
communication ("local") or what it would take at best; the time of the CPU; what rank 0 sent; page
faults; the most that tensors take, counted exactly; and by how much the process grows in a step.

`--model deep` asks how long the engine itself takes, and `--model ranks` whether it takes longer on
1,024 ranks than on 8 (host.py); the others train a GPT (models.py). `--limit` asks who trains where
a rank has only so much memory (limited.py).
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from tests.bench import limited, net, slow_links
from tests.bench.contenders import CONTENDERS, HYBRID, MEANWHILE, PLAIN
from tests.bench.host import (
    ONE_FILE,
    RANKS,
    UNITS,
    calls_and_shares,
    calls_without,
    host_times,
    milliseconds,
    over_local,
    ratios,
    work,
)
from tests.bench.models import WORKLOADS
from tests.bench.net import Link
from tests.bench.report import MIB, picture, table
from tests.bench.steps import measured, on_gpus

IN_16_BITS = "FSDP1 prefetch", "FSDP2 tuned", "mini prefetch", "mini rows"
DEFAULT = (
    ["--model", "comm"],
    ["--model", "125m", "--bf16", "--world", "4", "--rounds", "5", "--only", *IN_16_BITS],
    ["--model", "350m", "--world", "4", "--limit", "3"],
)
"""What `make bench` runs without arguments: all contenders in fp32, some with a larger model in 16
bits, and one that takes more memory than DDP has."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="make bench",
        description=__doc__.partition("\n")[0],
        epilog="Without any option: " + "; ".join(map(shlex.join, DEFAULT)),
    )
    p.add_argument("--model", choices=[*WORKLOADS, "deep", "ranks"], default="comm")
    p.add_argument("--world", type=int, default=2, metavar="RANKS")
    p.add_argument("--rounds", type=int, default=15)
    links = "of the link of each rank; or table: several links, each for a few contenders"
    p.add_argument("--net", type=mbit, default=0, metavar="MBIT", help=links)
    p.add_argument("--bf16", action="store_true", help="gathers and reduces in 16 bits")
    p.add_argument("--limit", type=float, default=0, metavar="GIB", help="of memory, to each rank")
    p.add_argument("--offload", action="store_true", help="shards in the host's memory")
    p.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME")
    p.add_argument("--time-only", action="store_true", help="no memory, which takes as long again")
    p.add_argument("--json", type=Path, metavar="FILE", help="all that was measured")
    p.add_argument("--svg", type=Path, metavar="FILE", help="a picture; takes `local`")
    return p


TAKES = {"deep": ("rounds", "json"), "ranks": ("json",)}
"""What goes with a --model that has its own contenders, ranks and links."""


def refuse_what_is_not_taken(options: argparse.Namespace) -> None:
    """Else it would measure something else than was asked for, and not say so."""
    taken = TAKES.get(options.model)
    for name, value in vars(options).items():
        if taken and name not in ("model", *taken) and value != parser().get_default(name):
            option = "--" + name.replace("_", "-")
            goes_with = " and ".join(f"--{each}" for each in taken)
            parser().error(f"{option}: --model {options.model} goes with {goes_with} alone")


def mbit(word: str) -> float | str:
    """What `--net` takes."""
    return word if word == slow_links.WORD else float(word)


def names_of(options: argparse.Namespace) -> list[str]:
    """Who takes part."""
    left_out = (() if options.net else MEANWHILE) + (() if options.world > 2 else HYBRID)
    names = options.only or [name for name in CONTENDERS if name not in left_out]
    if not options.bf16 and not options.offload:
        return names
    print(f"without {', '.join(PLAIN)}, which have no such setting")
    names = [name for name in names if name not in PLAIN]
    if options.offload and not on_gpus(options.world):
        print("without FSDP1, whose offload pins memory, which takes an accelerator")
        names = [name for name in names if not name.startswith("FSDP1")]
    return names


def main(argv: list[str]) -> int:
    if not argv:
        return max(map(main, DEFAULT))
    options = parser().parse_args(argv)
    refuse_what_is_not_taken(options)
    if options.model == "deep":
        times = host_times(options.rounds)
        print(f"host time for each of {UNITS} units and step, beyond a plain module's:")
        theirs = over_local(times, "FSDP1")
        for name in list(times)[1:]:
            mine = over_local(times, name)
            print(f"  {name:10} {mine:6.0f} us  {mine / theirs:.2f} of FSDP1's")
        (calls, shares), (least, _) = map(calls_and_shares, ("mini", ONE_FILE))
        print(f"minifsdp: {calls:.0f} calls for that (one file: {least:.0f}), and the time is in")
        for name, share in shares.items():
            if share >= 0.01:
                print(f"  {share:4.0%} {name}")
        print("fewer calls without")
        for promise, fewer in calls_without().items():
            print(f"  {fewer:4.0f} {promise}")
        found: dict[str, object] = {**times}
    elif options.model == "ranks":
        few, many = (work(milliseconds, ranks) for ranks in RANKS)
        print(f"ms of the CPU for {UNITS} units on {RANKS[1]:,} ranks (to those on {RANKS[0]}):")
        print("\n".join(ratios(few, many)))
        found = {str(RANKS[0]): few, str(RANKS[1]): many}
    elif options.net == slow_links.WORD:
        if why := net.missing():
            print(f"skipped: no slow links can be made here: {why}")
            return 0
        found = {**slow_links.main(options.rounds)}
    elif options.limit:
        if options.net or options.bf16 or options.offload:
            parser().error("--limit goes with none of --net, --bf16 and --offload")
        limit = int(options.limit * 1024 * MIB)
        why = limited.missing(options.world, limit)
        if why:
            print(f"skipped: no limit of {options.limit:g} GiB can be set here: {why}")
            return 0
        title = f"{options.model}: {WORKLOADS[options.model].about}; {options.world} ranks, fp32"
        print(title, flush=True)
        given = (options.model, options.only or limited.NAMES, options.world, limit)
        trained = limited.compared(*given, counts=not options.time_only)
        print(limited.table(trained, options.model, options.world, limit))
        found = {**trained}
    else:
        why = net.missing() if options.net else ""
        if why:
            print(f"skipped: no link of {options.net:g} Mbit/s can be made here: {why}")
            return 0
        names, workload = names_of(options), WORKLOADS[options.model]
        link = f"links of {options.net:g} Mbit/s" if options.net else "no limit to the link"
        gpus = torch.cuda.device_count()
        if gpus and not on_gpus(options.world):
            print(f"on the CPU: {gpus} GPUs are too few for {options.world} ranks (see --world)")
        title = f"{options.model}: {workload.about}; {options.world} ranks, {link}"
        print(f"{title}; medians of {options.rounds} rounds", flush=True)
        slow = Link(options.net) if options.net else None
        given = (options.world, options.rounds, slow, options.bf16, options.offload)
        steps = measured(options.model, names, *given, counts=not options.time_only)
        print(table(steps, options.model, options.world, options.net))
        if options.svg:
            picture(
                options.svg, steps, f"A step, in times of computing alone: {options.model}, {link}"
            )
        found = {**steps}
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options), **found}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What others have measured on GPUs, and what the virtual GPU makes of it: `make claims`.

Writes the tables in minifsdp/sim/README.md. Each claim is run, all with the same constants, and has
bounds within which it holds; else nothing is written. CI sees to it that no table is stale.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from minifsdp.core.limiter import EventQueue
from minifsdp.sim import cluster
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.cli.terminal import end_tidily
from minifsdp.sim.tape import Wait
from minifsdp.sim.training.history import APPROACHES
from minifsdp.sim.training.ordered import ORDERED
from minifsdp.sim.training.wrapped import ENGINES
from tests.all_cores import on_all_cores
from tests.sim.training.test_history import Crooked, last_step, mistargets, straight, train

README = Path(__file__).parents[1] / "minifsdp" / "sim" / "README.md"
MiB = 2**20


class Row(NamedTuple):
    """A claim, and what came out."""

    claim: str
    source: str
    claimed: str
    found: str
    holds: bool


def near(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether each figure is within 6 % of what it was when the bounds were set, so that a change
    of 10 % is noticed. The source's may be farther away: that is what the table shows."""
    pairs = zip(found, expected, strict=True)
    return all(abs(one / other - 1) < 0.06 for one, other in pairs)


@cache
def run(command: str, **constants: Any) -> dict[str, Any]:
    """Figures of one call of `minifsdp sim`, with other constants."""
    return simulate(parser().parse_args(command.split()), **constants).report()


def toy(comm: str, synchronize: bool, count: int = 20) -> int:
    """MiB reserved by tensors of 4M elements, one alive at a time, that ``comm`` allocates and the
    compute stream uses."""
    with cluster() as gpu:
        for _ in range(count):
            with gpu.on(comm):
                x = torch.empty(4_000_000)
            gpu.clock.launch("compute", 0.01)  # as torch.cuda._sleep
            x.add_(1)
            gpu.record_stream(x, "compute")
            del x
            if synchronize:
                gpu.synchronize()
    return gpu.allocator.reserved.peak // MiB


def two_streams() -> Row:
    found = [toy("compute", False), toy("unshard", False), toy("unshard", True)]
    return Row(
        "16 MB tensors, 20 times: one stream, two, two and a synchronization",
        "fairscale#972",
        "16, 16 MB each time, not given",
        ", ".join(map(str, found)) + " MiB",
        found == [16, 320, 16],
    )


def ablation() -> Row:
    base = (
        "--model gpt-30b --nodes 64 --gpu a100-40 --network 3200 --batch 2 --seq 512 "
        "--recompute full --limit "
    )
    off, on = run(base + "none"), run(base + "2")
    reserved, step = (off[k] / on[k] for k in ("peak reserved", "step"))
    return Row(
        "compute bound: reserved memory and step time without the limiter, to those with it. "
        f"`{base.removesuffix(' --limit ')}`",
        "pytorch#98354",
        "4.8 x, 1.05 x",
        f"{reserved:.1f} x, {step:.3f} x",
        3.6 < reserved < 4.2 and 1.02 < step < 1.05,
    )


T5 = "--model t5-500m --nodes 2 --gpu a100-40 --batch 16 --seq 128 --attention math"


def t5_saves(options: str = "", **constants: Any) -> tuple[float, float, float]:
    """Reserved without the limiter and what it saves, MiB; its step time, to that without."""
    off, on = (run(f"{T5} {options} --limit {limit}", **constants) for limit in ("none", "2"))
    reserved = [figures["peak reserved"] / MiB for figures in (off, on)]
    return reserved[0], reserved[0] - reserved[1], on["step"] / off["step"]


def t5_step(options: str = "", **constants: Any) -> float:
    """Seconds of a step with the limiter."""
    step: float = run(f"{T5} {options} --limit 2", **constants)["step"]
    return step


def t5() -> Row:
    reserved, saved, step = t5_saves()
    milliseconds = t5_step() * 1e3
    return Row(
        "T5 of 500M, 16 A100: reserved memory that the limiter saves, in equal time, and the time. "
        f"`{T5}`",
        "pytorch#83666",
        "938 of 6,784 MB, 3.4 s",
        f"{saved:,.0f} of {reserved:,.0f} MiB, {milliseconds:.0f} ms",
        abs(step - 1) < 0.02
        and near([saved, reserved, milliseconds], [998, 6382, 129])
        and 938 / 1.5 < saved * MiB / 1e6 < 938 * 1.5,
    )


def backward_prefetch() -> Row:
    base = "--model roberta-1gb --nodes 4 --network 100 --precision fp32 --batch 4 --seq 128"
    # With room for as many units as each needs, then all with room for two.
    least, equal = {"none": 1, "post": 1, "pre": 2}, {"none": 2, "post": 2, "pre": 2}
    found = []
    for room in (least, equal):
        runs = {way: run(f"{base} --backward {way} --limit {room[way]}") for way in room}
        post, pre = (runs[way]["step"] / runs["none"]["step"] - 1 for way in ("post", "pre"))
        memory = runs["pre"]["peak allocated"] / runs["none"]["peak allocated"] - 1
        found.append((pre, memory, post))
    (pre, memory, post), (equal_pre, _, equal_post) = found
    return Row(
        "an encoder of 1 GB on a slow network: backward prefetch PRE to none, time and memory; "
        f"POST to none. `{base}`, PRE with `--limit 2`, the others with `--limit 1`. Then all with "
        "`--limit 2`",
        "pytorch#69282, #70235",
        "-20 %, +10 %; less (no limiter)",
        ". All 2: ".join(f"{pre:+.0%}, {memory:+.0%}; {post:+.0%}" for pre, memory, post in found),
        -0.20 < pre < -0.14
        and 0.02 < memory < 0.06
        and -0.14 < post < -0.08
        and -0.14 < equal_pre < -0.10
        and abs(equal_pre - equal_post) < 0.01,
    )


def drift() -> Row:
    alive = {
        name: [forward["peak unsharded units"] for forward in train(APPROACHES[name], straight)[1]]
        for name in ("PyTorch", "minifsdp")
    }
    return Row(
        "units alive in the first, second and third forward, with PyTorch's queue and with ours",
        "torch's documentation",
        "2",
        "; ".join(", ".join(map(str, counts)) for counts in alive.values()),
        alive == {"PyTorch": [2, 3, 3], "minifsdp": [2, 2, 2]},
    )


def moot() -> Row:
    base = "--model gpt-1.3b --nodes 2 --batch 4 --seq 512 --strategy shard_grad_op --limit "
    off, on = run(base + "none"), run(base + "2")
    same = off["peak reserved"] == on["peak reserved"] and off["step"] == on["step"]
    return Row(
        f"`SHARD_GRAD_OP`: what the limiter changes. `{base.removesuffix(' --limit ')}`",
        "pytorch#83666",
        "nothing",
        "nothing" if same else "something",
        same,
    )


def host_bound() -> Row:
    base = "--model gpt-125m --gpus 8 --batch 1 --seq 512 --limit "
    without = run(base + "none")["step"]
    one, two, three = (run(base + limit)["step"] / without for limit in "123")
    return Row(
        "a small model, whose kernels are as short as their launches: step time with limits of 1, "
        f"2 and 3 units, to that without. `{base.removesuffix(' --limit ')}`",
        "torch's documentation",
        "slower",
        f"{one:.2f} x, {two:.2f} x, {three:.2f} x",
        near([one, two, three], [1.36, 1.11, 1.06]) and one > two > three > 1.02,
    )


NETWORKS = (3200, 800, 400, 100)
GAINS = {
    2: (0.97, 1.02, 1.37, 2.26),
    16: (1.13, 3.06, 2.64, 1.95),
    128: (7.89, 25.13, 17.57, 6.92),
}
"""By nodes, for each of these networks."""


def hybrid() -> Row:
    base = "--model gpt-1.3b --batch 4 --seq 512 --nodes {} --network {} --strategy {}"
    gains = {
        nodes: [
            run(base.format(nodes, network, "full_shard"))["step"]
            / run(base.format(nodes, network, "hybrid_shard"))["step"]
            for network in NETWORKS
        ]
        for nodes in (2, 16, 128)
    }
    overtakes = gains[2][0] < 1 < gains[2][-1] and min(gains[16]) > 1.1
    return Row(
        "hybrid sharding's speedup over full sharding, where a node's network has 3200, 800, 400 "
        "and 100 Gbit/s: on 2, on 16, on 128 nodes. `--model gpt-1.3b --batch 4 --seq 512`",
        "arXiv:2304.11277",
        "grows",
        "; ".join(", ".join(f"{gain:.2f}" for gain in each) for each in gains.values()),
        overtakes
        and min(gains[128]) > max(gains[16])
        and all(near(gains[nodes], GAINS[nodes]) for nodes in gains),
    )


CLAIMS: list[Callable[[], Row]] = [
    two_streams, ablation, t5, backward_prefetch, drift, moot, host_bound, hybrid
]  # fmt: skip


def claims(rows: list[Row]) -> str:
    """All of them, as a table."""
    lines = ((r.claim, r.source, r.claimed, r.found) for r in rows)
    return table(("what", "by", "measured there", "here"), lines)


T5_VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "as above": ("", {}),
    "precision fp32": ("--precision fp32", {}),
    "reductions in fp32": ("--precision bf16-fp32", {}),
    "a launch queue of 512": ("", {"launch_queue": 512}),
    "of 2048": ("", {"launch_queue": 2048}),
    "a host of half the speed": ("", {"launch": 12e-6, "moment": 80e-6}),
    "of a quarter": ("", {"launch": 24e-6, "moment": 160e-6}),
    "of twice the speed": ("", {"launch": 3e-6, "moment": 20e-6}),
    "a network of 25 Gbit/s": ("--network 25", {}),
    "of 8 Gbit/s": ("--network 8", {}),
    "512 tokens": ("--seq 512", {}),
    "512 tokens, fp32": ("--seq 512 --precision fp32", {}),
}


def t5_variations() -> str:
    """What the difference that the limiter makes for T5 depends on, as a table."""
    lines = []
    for what, (options, constants) in T5_VARIATIONS.items():
        reserved, saved, step = t5_saves(options, **constants)
        ms = t5_step(options, **constants) * 1e3
        lines.append((what, f"{reserved:,.0f}", f"{saved:,.0f}", f"{ms:,.0f}", f"{step:.3f} x"))
    head = ("with", "reserved, MiB", "the limiter saves, MiB", "a step with it, ms")
    return table((*head, "to one without"), lines)


FULL = {
    "gpt-30b": "--model gpt-30b --nodes 64 --gpu a100-40 --network 3200 --batch 2 --seq 512 "
    "--recompute full --limit none",
    "t5-500m": f"{T5} --seq 512 --precision fp32 --limit none",
}
ALLOC = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "garbage_collection_threshold:0.8",
)


def allocators() -> str:
    """What options of the allocator change where 40 GB are nearly full, as a table."""
    lines = []
    for model, command in FULL.items():
        for options in ("", *ALLOC):
            found = run(f"{command} --alloc {options}" if options else command)
            used, reserved = (found[f"peak {kind}"] / MiB for kind in ("active", "reserved"))
            lines.append(
                (
                    model,
                    f"`{options}`" if options else "none",
                    f"{used:,.0f}",
                    f"{reserved:,.0f}",
                    f"{reserved - used:,.0f}",
                    str(found["retries"]),
                    f"{found['step'] * 1e3:,.0f}",
                )
            )
    head = ("model", "`--alloc`", "active, MiB", "reserved, MiB", "more, MiB", "retries")
    return table((*head, "a step, ms"), lines)


def approaches() -> str:
    """How others gathered ahead, on a model that is not as simple as they took it for."""
    lines = []
    three = replace(APPROACHES["minifsdp"], limiter=lambda: EventQueue(3))
    ways = {**APPROACHES, "minifsdp, limit 3": three, "ordered frees": ORDERED}
    for name, approach in ways.items():
        gpu, reports = train(approach, Crooked)
        by_kind, last = mistargets(gpu), gpu.report()
        lines.append(
            (
                name,
                str(sum(isinstance(e, Wait) and e.by_limiter for e in last_step(gpu))),
                str(max(report["peak unsharded units"] for report in (reports[-1], last))),
                f"{last['peak reserved'] / MiB:,.0f}",
                f"{(reports[-1]['step'] + last['step']) * 1e3:.1f}",
                *(str(by_kind[kind]) for kind in KINDS),
            )
        )
    return table(
        ("approach", "host waits", "units alive", "reserved, MiB", "step, ms", *KINDS), lines
    )


ROOM = {
    "computation": "--model gpt-1.3b --nodes 2 --gpu a100-80 --network 800 --batch 4",
    "computation, larger units": "--model gpt-7b --nodes 2 --gpu h100 --network 3200 --batch 2",
    "network": "--model gpt-1.3b --nodes 2 --gpu h100 --network 200 --batch 4 "
    "--precision bf16-fp32",
    "launches": "--model gpt-125m --gpu a100-80 --batch 1 --seq 512",
    "units in units": "--model gpt-1.3b --nodes 2 --gpu a100-80 --network 800 --batch 4 "
    "--unit part",
    "offload": "--model gpt-1.3b --nodes 2 --gpu a100-80 --batch 4 --offload yes",
}
"""By what binds the step."""
WAYS = {
    "PyTorch's queue": "--engine fsdp1",
    "limit 2": "--limit 2",
    "FSDP2": "--engine fsdp2",
}


def room() -> str:
    """Time and reserved memory of ways that have room for two units, or three, as a table."""
    lines = []
    for what, setting in ROOM.items():
        found = [run(f"{setting} {way}") for way in WAYS.values()]
        with patch.dict(ENGINES, fsdp1=ORDERED):  # another approach, with its own limiter
            found.append(run(f"{setting} --engine fsdp1 --forward pre"))
        pytorch, two, _, ordered = found
        if ordered["step"] > 1.005 * pytorch["step"]:
            sys.exit(f"ordered frees are slower than PyTorch's queue: {what}")
        if what != "offload" and ordered["peak reserved"] > 1.001 * two["peak reserved"]:
            sys.exit(f"ordered frees take more memory than two units: {what}")
        cells = (f"{f['step'] * 1e3:,.1f}; {f['peak reserved'] / MiB:,.0f}" for f in found)
        lines.append((what, f"`{setting}`", *cells))
    return table(("bound by", "run", *WAYS, "ordered frees"), lines)


KINDS = ("already unsharded", "not needed yet", "already resharded")


def table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """As Markdown."""
    rows = [head, ("---",) * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def readme_with(target: str = "claims", **tables: str) -> str:
    """The README with these tables, in the places where this target of `make` writes."""
    text = README.read_text()
    for name, new in tables.items():
        between = rf"(<!-- make {target} writes: {name} -->\n)(.*?)(<!-- end -->)"
        (found,) = re.findall(between, text, re.DOTALL)
        text = text.replace("".join(found), f"{found[0]}{new}\n{found[2]}")
    return text


TABLES: list[Callable[[], str]] = [t5_variations, room, allocators, approaches]


def made(function: Callable[[], Any]) -> Any:
    """What a claim or a table is, in a process of its own."""
    return function()


if __name__ == "__main__":
    end_tidily()
    parts = [*TABLES, *CLAIMS]  # the longest first, or one core would do nothing in the end
    rows, tables = [], {}
    for part, found in zip(parts, on_all_cores(made, parts), strict=True):
        if isinstance(found, str):
            print(f"the table of {part.__name__}", flush=True)
            tables[part.__name__] = found
            continue
        rows.append(found)
        print(f"{len(rows)} of {len(CLAIMS)} claims: {part.__name__}: {found.found}", flush=True)
        if not found.holds:
            sys.exit(f"does not hold any more: {found.claim}: {found.claimed}")
    README.write_text(readme_with(claims=claims(rows), **tables))

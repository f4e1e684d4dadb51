"""What others have measured on GPUs, and what the virtual GPU makes of it: `make claims`.

Writes the table in minifsdp/sim/README.md. Each claim is run, all with the same constants; a test
has their bounds, and sees to it that the table is what the code gives.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minifsdp.sim import cluster
from minifsdp.sim.__main__ import parser, simulate

README = Path(__file__).parents[1] / "minifsdp" / "sim" / "README.md"
MiB = 2**20


class Row(NamedTuple):
    """A claim, and what came out."""

    claim: str
    source: str
    claimed: str
    found: str
    holds: bool


@cache
def run(command: str) -> dict[str, Any]:
    """Figures of one call of `python -m minifsdp.sim`."""
    return simulate(parser().parse_args(command.split())).report()


def toy(comm: str, synchronize: bool, count: int = 20) -> int:
    """MiB reserved by tensors of 4M elements, one alive at a time, that ``comm`` allocates and the
    compute stream uses."""
    with cluster() as gpu:
        for _ in range(count):
            with gpu.on(comm):
                x = torch.empty(4_000_000)
            gpu.clock.launch("compute", 0.01)  # as torch.cuda._sleep
            x.add_(1)
            gpu.record_use(x, "compute")
            del x
            if synchronize:
                gpu.synchronize()
    return gpu.allocator.reserved.peak // MiB


def two_streams() -> Row:
    found = [toy("compute", False), toy("unshard", False), toy("unshard", True)]
    return Row(
        "16 MB tensors, 20 times: one stream, two, two and a synchronization",
        "fairscale#972",
        "16, 16 each time, 16 MB",
        ", ".join(map(str, found)) + " MiB",
        found == [16, 320, 16],
    )


def ablation() -> Row:
    base = (
        "--model gpt-13b --nodes 32 --gpu a100-80 --network 3200 --batch 2 --seq 512 "
        "--recompute yes --limit "
    )
    off, on = run(base + "none"), run(base + "2")
    reserved, step = (off[k] / on[k] for k in ("peak reserved", "step"))
    return Row(
        "compute bound: reserved memory and step time without the limiter, to those with it. "
        f"`{base.removesuffix(' --limit ')}`",
        "pytorch#98354",
        "4.8 x, 1.05 x",
        f"{reserved:.1f} x, {step:.3f} x",
        reserved >= 4 and abs(step - 1) < 0.01,
    )


T5 = "--model t5-500m --nodes 2 --gpu a100-40 --batch 16 --seq 128"


def t5() -> Row:
    off, on = run(T5 + " --limit none"), run(T5 + " --limit 2")
    saved = (off["peak reserved"] - on["peak reserved"]) / MiB
    same = abs(off["step"] / on["step"] - 1) < 0.01
    return Row(
        f"T5 of 500M, 16 A100: reserved memory that the limiter saves, in equal time. `{T5}`",
        "pytorch#83666",
        "938 of 6,784 MB",
        f"{saved:,.0f} of {off['peak reserved'] / MiB:,.0f} MiB",
        same and 938 / 1.5 < saved * MiB / 1e6 < 938 * 1.5,
    )


def backward_prefetch() -> Row:
    base = "--model vit-h --nodes 4 --network 100 --precision fp32 --batch 8 --seq 128 --backward "
    pre, post, none = (run(base + way) for way in ("pre", "post", "none"))
    faster, memory = (pre[k] / none[k] - 1 for k in ("step", "peak allocated"))
    return Row(
        "an encoder on a slow network: backward prefetch PRE to none, time and memory. "
        f"`{base.removesuffix(' --backward ')}`",
        "the change that brought it to PyTorch",
        "about -20 %, +10 %",
        f"{faster:+.0%}, {memory:+.0%} (POST {post['step'] / none['step'] - 1:+.0%})",
        -0.35 < faster < -0.1 and 0 < memory < 0.15,
    )


def moot() -> Row:
    base = "--model gpt-1.3b --nodes 2 --batch 4 --seq 512 --strategy shard_grad_op --limit "
    off, on = run(base + "none"), run(base + "2")
    same = off["peak reserved"] == on["peak reserved"] and off["step"] == on["step"]
    return Row(
        "`SHARD_GRAD_OP`: what the limiter changes",
        "fairscale#972",
        "nothing",
        "nothing" if same else "something",
        same,
    )


def hybrid() -> Row:
    base = "--model gpt-125m --batch 8 --seq 512 --network 100 --nodes {} --strategy {}"
    gains = [
        run(base.format(nodes, "full_shard"))["step"]
        / run(base.format(nodes, "hybrid_shard"))["step"]
        for nodes in (2, 16, 128)
    ]
    return Row(
        "hybrid sharding's speedup over full sharding on 2, 16 and 128 nodes, 100 Gbit/s each",
        "arXiv:2304.11277",
        "grows",
        ", ".join(f"{gain:.1f} x" for gain in gains),
        gains == sorted(gains) and gains[0] > 1,
    )


CLAIMS: list[Callable[[], Row]] = [two_streams, ablation, t5, backward_prefetch, moot, hybrid]


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = ["| what | by | measured there | here |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.claim} | {r.source} | {r.claimed} | {r.found} |" for r in rows]
    return "\n".join(lines)


def readme_with(rows: list[Row]) -> str:
    """The README with a new table."""
    between = r"(<!-- make claims writes this table -->\n).*?(<!-- end -->)"
    return re.sub(
        between, lambda m: f"{m[1]}{table(rows)}\n{m[2]}", README.read_text(), flags=re.DOTALL
    )


if __name__ == "__main__":
    README.write_text(readme_with([claim() for claim in CLAIMS]))
    print(README.read_text())

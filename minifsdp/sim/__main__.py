"""Run a training step on a virtual cluster, from the shell::

    python -m minifsdp.sim --model t5-500m --nodes 2 --gpus 8 --gpu a100-40 --batch 16 --seq 128
    python -m minifsdp.sim --model gpt-1.3b --sweep limit=none,1,2,3
    python -m minifsdp.sim --model gpt-1.3b --batch 4 --svg step.svg --trace step.json

It says whether it fits, how fast it is and what binds.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    ForwardPrefetch,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim.cluster import cluster
from minifsdp.sim.costs import GB, GPUS
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.models import MODELS, find
from minifsdp.sim.timeline import text

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
    "hybrid_shard_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
BACKWARD = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
FORWARD: dict[str, bool | ForwardPrefetch] = {
    "none": False,
    "pre": ForwardPrefetch.FORWARD_PRE,
    "post": ForwardPrefetch.FORWARD_POST,
}
PRECISION = {
    "fp32": None,
    "bf16": MixedPrecision(torch.bfloat16),
    "bf16-fp32": MixedPrecision(torch.bfloat16, torch.float32),
}


def parser() -> argparse.ArgumentParser:
    """The options; all but the last five may be swept."""
    p = argparse.ArgumentParser(
        prog="python -m minifsdp.sim", description="A training step on a virtual cluster."
    )
    p.add_argument("--model", default="gpt-125m", help=f"{', '.join(MODELS)}; or module:callable")
    p.add_argument("--gpu", default="a100-40", help=", ".join(GPUS))
    p.add_argument("--nodes", type=int, default=1)
    p.add_argument("--gpus", type=int, default=8, help="of a node (default: 8)")
    p.add_argument("--network", type=float, default=400, help="of a node, Gbit/s (default: 400)")
    p.add_argument("--batch", type=int, default=8, help="samples on each GPU (default: 8)")
    p.add_argument("--seq", type=int, default=1024, help="tokens in each (default: 1024)")
    p.add_argument("--strategy", default="full_shard", choices=STRATEGIES)
    p.add_argument("--precision", default="bf16", choices=PRECISION)
    p.add_argument("--limit", default="2", help="units alive at once, or none (default: 2)")
    p.add_argument("--backward", default="pre", choices=BACKWARD, help="prefetch")
    p.add_argument("--forward", default="none", choices=FORWARD, help="prefetch")
    p.add_argument("--offload", default="no", choices=("no", "yes"), help="parameters on the host")
    p.add_argument(
        "--recompute", default="no", choices=("no", "yes"), help="activation checkpointing"
    )
    p.add_argument("--sweep", metavar="NAME=A,B,...", help="a row for each value of an option")
    p.add_argument("--svg", metavar="FILE", help="draw the step")
    p.add_argument("--trace", metavar="FILE", help="for ui.perfetto.dev")
    p.add_argument("--snapshot", metavar="FILE", help="for pytorch.org/memory_viz")
    p.add_argument("--json", action="store_true", help="print figures only")
    return p


def simulate(options: argparse.Namespace, steps: int = 3, **constants: Any) -> VirtualGpu:
    """The GPU, after some steps; the last one is in a steady state.

    Raises:
        ValueError: an option makes no sense.
        torch.OutOfMemoryError: it does not fit.
    """
    job = find(options.model)
    for name in ("nodes", "gpus", "batch", "seq"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is at least 1, not {getattr(options, name)}")
    with torch.device("meta"):  # not yet on the GPU, which gets unit by unit, and keeps chunks
        module = job.build()
    for block in module.modules() if options.recompute == "yes" else ():
        if isinstance(block, job.blocks):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    around = {"network": options.network * GB / 8, **constants}
    with cluster(options.gpu, options.nodes, options.gpus, **around) as gpu:
        model = FSDP(
            module,
            auto_wrap_policy=ModuleWrapPolicy(set(job.blocks)),
            sharding_strategy=STRATEGIES[options.strategy],
            mixed_precision=PRECISION[options.precision],
            limit_all_gathers=_limit(options.limit),
            backward_prefetch=BACKWARD[options.backward],
            forward_prefetch=FORWARD[options.forward],
            cpu_offload=CPUOffload(options.offload == "yes"),
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(steps):
            loss = job.loss(model, options.batch, options.seq)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            gpu.step()
    return gpu


def _limit(given: str) -> bool | int:
    try:
        return False if given == "none" else int(given)
    except ValueError:
        raise ValueError(f"--limit is a whole number or none, not {given!r}") from None


def binds(figures: dict[str, Any]) -> str:
    """What the step's time is made of, in a word."""
    if figures["idle"] > 0.25 * figures["step"]:
        return "host"
    if figures["exposed communication"] > 0.25 * figures["step"]:
        return "network"
    return "compute"


def row(options: argparse.Namespace) -> tuple[dict[str, Any], VirtualGpu | None]:
    """Figures of one run. Where it does not fit there are none."""
    try:
        gpu = simulate(options)
    except torch.OutOfMemoryError as error:
        return {"fits": False, "why": str(error)}, None
    figures = gpu.report()
    return {"fits": True, **figures, "binds": binds(figures)}, gpu


def in_words(figures: dict[str, Any]) -> dict[str, str]:
    """Milliseconds and mebibytes."""
    words = {}
    for name, value in figures.items():
        if name.startswith(("peak", "bytes")):
            words[name] = f"{value / 2**20:,.0f} MiB"
        elif name == "flops":
            words[name] = f"{value / 1e12:,.2f} T"
        else:
            words[name] = f"{value * 1e3:,.1f} ms" if isinstance(value, float) else str(value)
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where nothing fits; 2 where an option makes no sense."""
    options = parser().parse_args(arguments)
    name, _, values = (options.sweep or "").partition("=")
    if options.sweep and (not values or name not in vars(options)):
        return _refuse(f"--sweep is NAME=A,B,... with the name of an option, not {options.sweep!r}")
    runs = []
    for value in values.split(",") if options.sweep else [None]:
        given = argparse.Namespace(**vars(options))
        if value is not None:
            try:  # as if it had been written there
                setattr(given, name, getattr(parser().parse_args([f"--{name}", value]), name))
            except SystemExit:
                return 2
        if sys.stderr.isatty():
            print(f"\r{name} {value or ''} ...\x1b[K", end="", file=sys.stderr, flush=True)
        try:
            runs.append((value, *row(given)))
        except ValueError as error:
            return _refuse(str(error))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps([{name or "run": value, **figures} for value, figures, _ in runs]))
    elif options.sweep:
        _table(name, [(value, figures) for value, figures, _ in runs])
    else:
        (_, figures, gpu) = runs[0]
        if gpu is not None:
            print(text(gpu.tape), end="\n\n")
        for key, words in in_words(figures).items():
            print(f"{key:28} {words:>14}" if key != "why" else words)
    _write_files(options, runs[-1][2])
    return 0 if any(figures["fits"] for _, figures, _ in runs) else 1


def _write_files(options: argparse.Namespace, gpu: VirtualGpu | None) -> None:
    """Of the last run; none, if that did not fit."""
    if gpu is None:
        return
    if options.svg:
        gpu.timeline(
            options.svg, f"{options.model}, {options.nodes} x {options.gpus} {options.gpu}"
        )
    if options.trace:
        gpu.trace(options.trace)
    if options.snapshot:
        gpu.snapshot(options.snapshot)


def _table(name: str, rows: list[tuple[str | None, dict[str, Any]]]) -> None:
    columns = ("step", "exposed communication", "idle", "peak allocated", "peak reserved", "binds")
    print(f"{name:>12} " + "".join(f"{column:>23}" for column in columns))
    for value, figures in rows:
        words = in_words(figures)
        shown = [words[column] for column in columns] if figures["fits"] else ["does not fit"]
        print(f"{value:>12} " + "".join(f"{word:>23}" for word in shown))


def _refuse(message: str) -> int:
    print(f"minifsdp.sim: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*NumPy.*")
    sys.exit(main())

"""One run: settings in, a virtual GPU that has trained out. And what binds it.

The settings are named as on the command line; see :func:`add_settings`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from minifsdp import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    ForwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim.advice import advice
from minifsdp.sim.attention import BACKENDS, only
from minifsdp.sim.cluster import cluster
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.gpus import GB, GPUS, GiB, preset
from minifsdp.sim.models import Job
from minifsdp.sim.presets import MODELS, find
from minifsdp.sim.recompute import recompute
from minifsdp.sim.throughput import model_flops, throughput
from minifsdp.support.pytree import tensors_in

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
UNITS = ("model", "block", "part")
YES = ("no", "yes")


def add_settings(p: argparse.ArgumentParser) -> None:
    """A model, a cluster, and how to train the one on the other. All may be swept."""
    p.add_argument(
        "--model",
        default="gpt-125m",
        help=f"{', '.join(MODELS)}; module:callable; or hf:CLASS, with --config",
    )
    p.add_argument("--config", default="", help="of an hf: model, a JSON file")
    p.add_argument("--gpu", default="a100-40", help=", ".join(GPUS))
    p.add_argument("--nodes", type=int, default=1)
    p.add_argument("--gpus", type=int, default=8, help="of a node (default: 8)")
    p.add_argument("--network", type=float, default=400, help="of a node, Gbit/s (default: 400)")
    p.add_argument("--batch", type=int, default=8, help="samples on each GPU (default: 8)")
    p.add_argument("--seq", type=int, default=1024, help="tokens in each (default: 1024)")
    p.add_argument("--alloc", default="", help="as PYTORCH_CUDA_ALLOC_CONF: alloc_conf.py")
    p.add_argument("--strategy", default="full_shard", choices=STRATEGIES)
    p.add_argument("--precision", default="bf16", choices=PRECISION)
    p.add_argument("--limit", default="2", help="units alive at once, or none (default: 2)")
    p.add_argument("--backward", default="pre", choices=BACKWARD, help="prefetch")
    p.add_argument("--forward", default="none", choices=FORWARD, help="prefetch")
    p.add_argument("--unit", default="block", choices=UNITS, help="what is gathered at once")
    p.add_argument("--offload", default="no", choices=YES, help="parameters on the host")
    p.add_argument(
        "--recompute",
        default="none",
        help="activation checkpointing: none, full, selective, or a share of the blocks: 1/2",
    )
    p.add_argument("--attention", default="auto", choices=["auto", *BACKENDS], help="its kernel")
    p.add_argument(
        "--loss", default="whole", choices=["whole", "fused", "chunked"], help="memory of logits"
    )
    p.add_argument("--price", type=float, help="of a GPU, dollars an hour")
    p.add_argument(
        "--memory", type=float, help="of a GPU, for PyTorch, GiB (default: what is left)"
    )


def simulate(
    options: argparse.Namespace,
    steps: int = 3,
    progress: Callable[[str], None] = lambda _: None,
    **constants: Any,
) -> VirtualGpu:
    """The GPU, after some steps; the last one is in a steady state.

    Args:
        options: as of :func:`add_settings`.
        progress: told what is being done.
        constants: of :class:`minifsdp.sim.costs.Cluster`, other than theirs.

    Raises:
        ValueError: an option makes no sense, or the model cannot run without real values.
        torch.OutOfMemoryError: it does not fit.
    """
    for name in ("nodes", "gpus", "batch", "seq"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is at least 1, not {getattr(options, name)}")
    if options.network <= 0:
        raise ValueError(f"--network is more than 0 Gbit/s, not {options.network:g}")
    if options.memory is not None and options.memory <= 0:
        raise ValueError(f"--memory is more than 0 GiB, not {options.memory:g}")
    job = find(options.model, options.config)
    progress("building the model")
    with torch.device("meta"):  # not yet on the GPU, which gets unit by unit, and keeps chunks
        module = job.build()
    recompute(
        [part for part in module.modules() if isinstance(part, job.blocks)], options.recompute
    )
    if options.loss != "whole":
        if not hasattr(module, "loss"):
            raise ValueError(f"model {options.model!r} has its own loss: --loss whole")
        module.loss = options.loss
    around = {"network": options.network * GB / 8, "alloc": options.alloc, **constants}
    if options.memory is not None:
        around["taken"] = preset(options.gpu).memory - int(options.memory * GiB)
    virtual = cluster(options.gpu, options.nodes, options.gpus, **around)
    with virtual as gpu, only(options.attention):
        if getattr(options, "snapshot", None):
            gpu.record_memory_history()
        model = FSDP(
            module,
            auto_wrap_policy=_units(job, options.unit, module),
            sharding_strategy=STRATEGIES[options.strategy],
            mixed_precision=PRECISION[options.precision],
            limit_all_gathers=limit_of(options.limit),
            backward_prefetch=BACKWARD[options.backward],
            forward_prefetch=FORWARD[options.forward],
            cpu_offload=CPUOffload(options.offload == "yes"),
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for step in range(steps):
            progress(f"step {step + 1} of {steps}")
            gpu.phase("forward")
            try:
                loss = job.loss(model, options.batch, options.seq)
            except (NotImplementedError, RuntimeError) as error:
                if "attention kernels" in str(error):
                    raise ValueError(f"--attention {options.attention}: {error}") from error
                if isinstance(error, torch.OutOfMemoryError) or "meta" not in str(error):
                    raise
                raise ValueError(
                    f"model {options.model!r} cannot run on tensors without values: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            gpu.phase("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            gpu.phase("optimizer")
            gpu.tag("parameters", model.parameters())
            gpu.tag("gradients", (param.grad for param in model.parameters()))
            with torch.device("cpu"):  # where Adam counts steps; torch 2.11 does not insist on it
                optimizer.step()
            gpu.tag("optimizer", tensors_in(optimizer.state))
            optimizer.zero_grad()
            loss.item()
            gpu.step()
    return gpu


def _units(job: Job, unit: str, module: torch.nn.Module) -> CustomPolicy | None:
    """The blocks; or also the large parts inside of them; or nothing but the whole model."""
    if unit == "model":
        return None
    chosen = {block for block in module.modules() if isinstance(block, job.blocks)}
    if unit == "part":
        for block in list(chosen):
            whole = sum(p.numel() for p in block.parameters())
            for part in block.children():
                if sum(p.numel() for p in part.parameters()) > whole / 5:
                    chosen.add(part)
    return CustomPolicy(lambda inner: inner in chosen)


def limit_of(given: str) -> bool | int:
    """What ``--limit`` means.

    Raises:
        ValueError: it is neither a number nor ``none``.
    """
    try:
        return False if given == "none" else int(given)
    except ValueError:
        raise ValueError(f"--limit is a whole number or none, not {given!r}") from None


def measure(
    options: argparse.Namespace, steps: int = 3, progress: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], VirtualGpu | None]:
    """Figures of one run. Where it does not fit there are none, but torch's words."""
    try:
        gpu = simulate(options, steps, progress)
    except torch.OutOfMemoryError as error:
        return {"fits": False, "why": str(error)}, None
    figures = gpu.report()
    peak = gpu.cluster.gpu.flops if PRECISION[options.precision] else gpu.cluster.gpu.flops_fp32
    work = model_flops(gpu.tape), peak, options.batch, options.seq, options.price
    figures |= throughput(figures, *work) | {"binds": binds(figures)}
    return {"fits": True, **figures, "advice": str(advice(gpu, figures, options))}, gpu


def binds(figures: dict[str, Any]) -> str:
    """What the step's time is made of, in a word."""
    if figures["idle"] > 0.25 * figures["step"]:
        return "host"
    if figures["exposed communication"] > 0.25 * figures["step"]:
        return "network"
    return "compute"

"""One run: settings in, a virtual GPU that has trained out. And what binds it.

The settings are named as on the command line; see options.py.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.outputs import tensors_in
from minifsdp.sim.cli.blame import blaming
from minifsdp.sim.cli.conflicts import check, sizes_of
from minifsdp.sim.cli.machine import machine
from minifsdp.sim.cli.values import ImpossibleError
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.advice import advice
from minifsdp.sim.figures.likely import doublings, likely
from minifsdp.sim.figures.throughput import model_flops, throughput
from minifsdp.sim.hardware.attention import only
from minifsdp.sim.tape import HOST
from minifsdp.sim.training.fused import fuse
from minifsdp.sim.training.models import Job
from minifsdp.sim.training.offload_activations import offloaded_activations
from minifsdp.sim.training.optimizers import OPTIMIZERS
from minifsdp.sim.training.presets import find
from minifsdp.sim.training.recompute import recompute
from minifsdp.sim.training.wrapped import tf32, wrapped
from minifsdp.sim.virtual_cluster import cluster


def simulate(
    options: argparse.Namespace,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **constants: Any,
) -> VirtualGpu:
    """The GPU, after some steps; the last one is in a steady state.

    Args:
        options: as of :func:`minifsdp.sim.cli.options.add_settings`.
        steps: other than theirs.
        progress: told what is being done.
        constants: of :class:`minifsdp.sim.hardware.costs.Cluster`, other than theirs.

    Raises:
        ValueError: an option makes no sense, or the model cannot be run.
        ImpossibleError: options make no sense together.
        torch.OutOfMemoryError: it does not fit.
    """
    check(options)
    job = find(options.model, options.config, options.input, sizes_of(options))
    progress("building the model")
    with torch.device("meta"), blaming(options.model, "its constructor"):
        # not yet on the GPU, which gets unit by unit, and keeps chunks
        module = job.build()
    blocks = [part for part in module.modules() if isinstance(part, job.blocks)]
    fused = (options.fused == "yes" or options.compile == "yes") and fuse(module)
    if options.fused == "yes" and not fused:
        raise ImpossibleError(
            f"--fused yes is for the Llamas of --model; {options.model!r} has no norm, rotary "
            f"embedding or SwiGLU whose kernels are known to be several"
        )
    recompute(blocks, options.recompute)
    if options.loss != "whole":
        if not isinstance(getattr(module, "loss", None), str):  # of a model in training/
            raise ImpossibleError(f"model {options.model!r} has its own loss: --loss whole")
        module.loss = options.loss
    kind, around = machine(options)
    around |= {"alloc": options.alloc, "triton": options.attention == "triton"} | constants
    with (
        cluster(kind, **around) as gpu,
        only(options.attention),
        tf32(options.precision),
    ):
        if getattr(options, "snapshot", None) or getattr(options, "against", None):
            gpu.record_memory_history()
        # With offload a program gives a model memory on the host (param_init_fn), unit by unit: its
        # shards stay there, and a GPU may have no room for a unit in 32 bits, and flat beside it.
        wraps_on = gpu.on(HOST) if options.offload == "yes" else nullcontext()
        with blaming(options.model, "being wrapped"), wraps_on:
            model = wrapped(module, job.blocks, options)
        optimizer = OPTIMIZERS[options.optimizer](model.parameters())
        steps = options.steps if steps is None else steps
        for step in range(steps):
            progress(f"step {step + 1} of {steps}")
            _train(job, model, optimizer, gpu, options)
    return gpu


def _train(
    job: Job,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    gpu: VirtualGpu,
    options: argparse.Namespace,
) -> None:
    """One step of the optimizer, of one batch or several."""
    compiled = gpu.compiled if options.compile == "yes" else nullcontext
    kept = offloaded_activations if options.offload_activations == "yes" else nullcontext
    for micro in range(options.accumulate):
        waits = options.no_sync == "yes" and micro < options.accumulate - 1
        with model.no_sync() if waits else nullcontext():
            gpu.phase("forward")
            with blaming(options.model, "its forward"), compiled(), kept():
                loss = job.loss(model, options.batch, options.seq)
            if options.accumulate > 1:
                loss = loss / options.accumulate
            gpu.phase("backward")
            with blaming(options.model, "its backward"), compiled():
                loss.backward()  # type: ignore[no-untyped-call]
    gpu.phase("optimizer")
    if options.clip == "yes":
        model.clip_grad_norm_(1.0)  # which norm makes no difference to what is done
    gpu.tag("parameters", model.parameters())
    gpu.tag("gradients", (param.grad for param in model.parameters()))
    with torch.device("cpu"):  # where Adam counts steps; torch 2.11 does not insist on it
        optimizer.step()
    gpu.tag("optimizer", tensors_in(optimizer.state))
    optimizer.zero_grad()
    loss.item()
    gpu.step()


def measure(
    options: argparse.Namespace,
    steps: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **constants: Any,
) -> tuple[dict[str, Any], VirtualGpu | None]:
    """Figures of one run, with the arguments of :func:`simulate`. Where it does not fit there are
    none, but torch's words.

    Raises:
        ValueError, ImpossibleError: as :func:`simulate` does.
    """
    try:
        gpu = simulate(options, steps, progress, **constants)
    except torch.OutOfMemoryError as error:
        return {"fits": False, "why": str(error)}, None
    figures = gpu.report()
    kind = gpu.cluster.gpu
    peak = {"fp32": kind.flops_fp32, "tf32": kind.flops_tf32}.get(options.precision, kind.flops)
    samples = options.batch * options.accumulate
    length, what = (None, "samples") if options.input else (options.seq, "tokens")
    work = model_flops(gpu.tape), peak, samples, length, options.price
    figures |= throughput(figures, *work)
    far = doublings(gpu.cluster, length, options.precision, options.compile == "yes")
    speed = figures[f"{what}/s per GPU"]
    figures[f"{what}/s, range"] = likely(speed, gpu.cluster.gpu, sum(far.values()))
    if far:
        figures["range is wider for"] = ", ".join(far)
    figures["binds"] = binds(figures)
    return {"fits": True, **figures, "advice": str(advice(gpu, figures, options))}, gpu


def no_run(error: ImpossibleError) -> dict[str, Any]:
    """What stands in the place of figures."""
    return {"fits": False, "impossible": True, "why": str(error)}


def binds(figures: dict[str, Any]) -> str:
    """What the step's time is made of, in a word."""
    if figures["idle"] > 0.25 * figures["step"]:
        return "host"
    if figures["exposed communication"] > 0.25 * figures["step"]:
        return "network"
    return "compute"

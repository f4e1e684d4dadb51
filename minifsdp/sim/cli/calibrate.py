"""``minifsdp calibrate``: the constants of one's own machine, in a file."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from minifsdp.sim.calibration import profiles
from minifsdp.sim.calibration.machine import LINKS_REACHED, Device, Samples, around, gpu_of
from minifsdp.sim.calibration.ranks import samples, this_machine
from minifsdp.sim.cli.terminal import Progress
from minifsdp.sim.hardware.cluster_file import content

WORDS = {
    "products": "products in 16 bits",
    "products_fp32": "products in fp32",
    "attention": "attention",
    "passes": "passes",
    "collectives": "collectives",
    "beside": "products beside a collective",
    "launch": "the host's launches",
    "host": "the host's memory",
    "copies": "copies to the device",
    "taken": "memory that CUDA takes",
}


def calibrate(options: argparse.Namespace, progress: Progress) -> int:
    """Measure, or read a profile, and write the file.

    Raises:
        ValueError: an option makes no sense, or a rank has failed.
    """
    if options.profile:
        found, device = profiles.read(options.profile, options.gpu or "")
        about = f"from the profile {options.profile}"
    else:
        found, device = _measured(options.ranks)
        about = f"{device.ranks} ranks on {device.name}, torch {torch.__version__}"
    gpu, constants = gpu_of(found, device), around(found, device)
    progress("")
    Path(options.output).write_text(content(gpu, constants, about))
    if options.json:
        measured = {"gpu": asdict(gpu), "cluster": constants, "not found": _missing(found)}
        document = {"about": about, "ranks": device.ranks, **measured, "file": options.output}
        print(json.dumps(document))
    else:
        print(_report(found, device, options.output))
    return 0


def _measured(ranks: int | None) -> tuple[Samples, Device]:
    here = torch.cuda.device_count()
    if here and ranks is not None and ranks > here:
        raise ValueError(f"--ranks {ranks}: there are {here} GPUs here")
    device = this_machine(ranks or here or 2)
    try:
        return samples(device), device
    except RuntimeError as error:
        raise ValueError(f"calibrate: {error}") from error


def _report(found: Samples, device: Device, path: str) -> str:
    gpu, constants = gpu_of(found, device), around(found, device)
    of = {
        "products": f"{gpu.flops * gpu.products / 1e12:,.3g} TFLOPS",
        "products_fp32": f"{gpu.flops_fp32 * gpu.products_fp32 / 1e12:,.3g} TFLOPS",
        "passes": f"{gpu.bandwidth * gpu.passes / 1e9:,.1f} GB/s",
        "beside": f"{constants['beside_collectives']:.0%} of their speed",
        "launch": f"{constants['launch'] * 1e6:,.1f} us",
        "host": f"{constants['host_memory'] / 1e9:,.1f} GB/s",
        "copies": f"{gpu.pcie * LINKS_REACHED / 1e9:,.1f} GB/s",
        "collectives": f"{gpu.links * LINKS_REACHED / 1e9:,.2f} GB/s, "
        f"{constants['alpha_node'] * 1e6:,.0f} us",
        "attention": f"{gpu.attention:.0%} of the peak",
        "taken": f"{constants['taken'] / 2**20:,.0f} MiB",
    }
    measured = [f"{WORDS[name]:30} {of[name]}" for name in WORDS if getattr(found, name)]
    lines = [f"{device.name}, {device.ranks} ranks", *measured]
    if missing := _missing(found):
        usual = f"of {device.like.name}" if device.like else "usual"
        lines.append(f"not found, so as {usual}: {', '.join(missing)}")
    lines.append("not measured on one node: what is between nodes (--network, --latency)")
    return "\n".join([*lines, f"written to {path}; use it with --cluster {path}"])


def _missing(found: Samples) -> list[str]:
    """What there are no samples of."""
    return [WORDS[name] for name in WORDS if not getattr(found, name)]

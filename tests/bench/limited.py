"""Who trains where a rank has only so much memory: `make bench ARGS="--model 350m --limit 3"`.

With AdamW in fp32 each parameter takes 16 bytes: itself, its gradient, and two states. DDP holds
all of them on each rank. Sharded over four ranks they are four bytes for each parameter, and what
is unsharded comes on top: the root, and two blocks. DDP runs into a limit between the two.

The limit is the system's (RLIMIT_DATA of setrlimit(2)), which takes no root. It is one to all
memory that is the process's own and that it may write to: tensors, and what gloo, malloc and Python
keep. It counts from when the ranks have found each other, so that what torch itself takes is not a
part of it. What is asked for beyond it is refused, and torch raises an error. A control group would
take root, and would end the process without an error.
"""

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.contenders import PLAIN, Setting
from tests.bench.meters import (
    Tensors,
    available,
    build_counter,
    forget_resident_peak,
    own_memory,
    resident_peak,
)
from tests.bench.models import WORKLOADS
from tests.bench.report import MIB, columns
from tests.bench.steps import Job, Trainer, check_losses, environment, on_gpus

NAMES = ["DDP bucket view", "FSDP1 prefetch", "mini prefetch"]
"""The leanest DDP: its gradients are views of what it sends."""
STEPS = 2  # in the second, AdamW's states are there from the start
REFUSED = "can't allocate memory"
ADAMW = 16
"""Bytes for each parameter: itself, its gradient, two states."""


def missing(ranks: int, limit: int) -> str:
    """Why there can be no such limit here; empty if there can be."""
    if not sys.platform.startswith("linux"):
        return "elsewhere than on Linux RLIMIT_DATA does not count what malloc maps"
    if on_gpus(ranks):
        return "RLIMIT_DATA does not count a GPU's memory"
    free, needed = available() / MIB, ranks * limit / MIB
    if free < needed:
        return f"{ranks} ranks may take {needed:,.0f} MiB, and {free:,.0f} are free"
    return ""


def _train(rank: int, job: Job, setting: Setting, name: str, limit: int) -> None:
    """Each rank reports for itself and ends, whether or not it could train: those that wait for one
    that is out of memory lose their connection to it."""
    tensors = Tensors() if "LD_PRELOAD" in os.environ else None
    if limit:
        most = own_memory() + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    before, found = forget_resident_peak(), {"losses": [], "at": "wrapping", "error": ""}
    try:
        trainer = Trainer(name, rank, job, setting, torch.optim.AdamW)
        found["losses"] = trainer.losses
        for step in range(1, STEPS + 1):
            found["at"] = f"forward and backward of step {step}"
            loss = trainer.gradients()
            found["at"] = f"AdamW's step {step}"
            trainer.update()
            trainer.losses.append(loss.item())
        dist.barrier()
    except RuntimeError as error:
        found["error"] = str(error)
    found["resident"] = resident_peak() - before
    if tensors is not None:
        found["tensors"] = tensors.peak()
    Path(job.folder, f"rank{rank}").write_text(json.dumps(found))
    os._exit(0)


def trained(workload: str, name: str, ranks: int, limit: int, count: bool) -> dict[str, Any]:
    """What the rank reports that was out of memory or, if none was, the first one.

    Args:
        limit: bytes of a rank; 0: none.
        count: the tensors, which takes a C compiler. Then minifsdp returns freed memory at once.

    Raises:
        RuntimeError: a rank could not train for another reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(workload, [name], ranks, STEPS, False, False, folder, os.getpid())
        with environment(**({"LD_PRELOAD": str(build_counter(Path(folder)))} if count else {})):
            job.start(_train, name, limit)
        reports = [json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(ranks)]
    failed = [report for report in reports if report["error"]]
    refused = [report for report in failed if REFUSED in report["error"]]
    if failed and not refused:
        raise RuntimeError(f"{name} does not train: {failed[0]['error']}")
    return (refused or reports)[0]


def compared(
    workload: str, names: list[str], ranks: int, limit: int, counts: bool = True
) -> dict[str, dict[str, Any]]:
    """By contender: ``error`` and where it was (``at``), ``losses``, ``resident``; with ``counts``
    also ``tensors``, without a limit for who is out of memory.

    Raises:
        ValueError: the losses of two that train differ.
    """
    found = {name: trained(workload, name, ranks, limit, count=False) for name in names}
    losses = {name: each["losses"] for name, each in found.items() if not each["error"]}
    if len(losses) > 1:
        check_losses(losses, bf16=False)
    for name in names if counts and shutil.which("cc") else ():
        if not found[name]["error"]:
            found[name]["tensors"] = trained(workload, name, ranks, limit, count=True)["tensors"]
        elif name in PLAIN:  # one rank takes as much as each of several, and is enough to know it
            found[name]["tensors"] = trained(workload, name, 1, 0, count=True)["tensors"]
    return found


def table(found: dict[str, dict[str, Any]], workload: str, ranks: int, limit: int) -> str:
    """Who trains, and how much memory a rank takes for it."""
    whole = ADAMW * WORKLOADS[workload].nbytes / 4 / MIB
    rows = [["", "", "MiB RSS", "MiB tensors"]]
    for name, each in found.items():
        outcome = f"out of memory: {each['at']}" if each["error"] else "trains"
        tensors = f"{each['tensors'] / MIB:,.0f}" if "tensors" in each else ""
        rows.append([name, outcome, f"{each['resident'] / MIB:,.0f}", tensors])
    return (
        f"a limit of {limit / MIB:,.0f} MiB to each rank; parameters, gradients and AdamW's "
        f"states: {whole:,.0f} MiB, sharded {whole / ranks:,.0f}\n{columns(rows)}\n"
        "(tensors of who is out of memory: what it takes without a limit)"
    )

"""`make evidence DIR=~/my-fsdp`: that the student's functions hold on the GPUs of this machine.

Each rank runs tutorials/train_gpt.py for some steps, with the student's functions laid over the
reference, and a profiler while the sharded model trains. Rank 0 writes evidence.json, and
evidence-trace.json for ui.perfetto.dev.
Without GPUs the ranks use gloo, and evidence.json says so.
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tutorials.exercises.demo import TRAIN, lay_over, start_ranks


def hidden_part(events: list[dict[str, Any]]) -> float | None:
    """The part of the communication's time in which the GPU also computed.

    Args:
        events: of a profile, in Chrome's format. NCCL's kernels are named after it.

    Returns:
        0 to 1; None if there is no communication on a GPU.
    """
    from minifsdp.sim.figures.report import (  # not at the top: the student's files come first
        length,
        union,
    )

    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for kernel in (event for event in events if event.get("cat") == "kernel"):
        span = kernel["ts"], kernel["ts"] + kernel["dur"]
        spans["nccl" in kernel["name"].lower()].append(span)
    communication, compute = union(spans[True]), union(spans[False])
    if not communication:
        return None
    exposed = length(union([*communication, *compute])) - length(compute)
    return 1 - exposed / length(communication)


def train(arguments: tuple[str, ...]) -> tuple[list[str], Path]:
    """Train on this rank. What was printed, and a profile of the sharded model's steps."""
    main = runpy.run_path(str(TRAIN))["main"]
    program, trace, printed = main.__globals__, Path("evidence-trace.json"), io.StringIO()
    train_one = program["train"]
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()

    def train_profiled(model: Any, text: Any, args: Any, *reference: Any) -> Any:
        if reference:  # DDP's communication and its computation are no evidence
            return train_one(model, text, args, *reference)
        with profile(activities=activities) as profiled:
            losses = train_one(model, text, args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if os.environ["RANK"] == "0":
            profiled.export_chrome_trace(str(trace))
        return losses

    program["train"] = train_profiled
    with contextlib.redirect_stdout(printed):
        main(program["parse"](["--steps", "5", *arguments]))
    return printed.getvalue().splitlines(), trace


def main(folder: str, *arguments: str) -> None:
    """Start the ranks; or, on a rank, train, and write what was seen."""
    student = Path(folder).expanduser().resolve()
    if "RANK" not in os.environ:
        start_ranks("evidence", student, arguments)
        print("written: evidence.json, evidence-trace.json")
        return
    keys = lay_over(student)
    printed, trace = train(arguments)
    if os.environ["RANK"] != "0":
        return
    gpus = torch.cuda.is_available()
    found = {
        "exercises of the student": keys,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "device": torch.cuda.get_device_name() if gpus else "CPU; no GPU was found",
        "torch": torch.__version__,
        "compared with DDP": [line.strip() for line in printed if "bit-equal" in line],
        "peak reserved bytes": torch.cuda.max_memory_reserved() if gpus else None,
        "hidden part of the communication": hidden_part(
            json.loads(trace.read_text())["traceEvents"]
        ),
    }
    Path("evidence.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

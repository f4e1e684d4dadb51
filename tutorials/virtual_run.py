"""Steps on the virtual GPU for pages that hold a formula against them: each is run once."""

import warnings
from functools import cache
from itertools import accumulate
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.figures.memory_report import KINDS, lives
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import COMPUTE, Op
from minifsdp.sim.training.presets import MODELS


@cache
def run(words: str) -> tuple[dict[str, Any], VirtualGpu]:
    """The figures of a step, and the GPU that did it.

    Args:
        words: options of ``minifsdp sim``; of one that is there twice the last counts.
    """
    return measure(parser().parse_args(words.split()), 2)


@cache
def sizes(name: str) -> tuple[int, int, int]:
    """Parameters of a model, of one of its blocks, and of what is in no block."""
    with torch.device("meta"):
        model: Any = MODELS[name].build()
    whole, block = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
    return whole, block, whole - block * len(model.blocks)


def operators(gpu: VirtualGpu) -> list[Op]:
    """Those of the last step."""
    return [entry for entry in last_step(gpu.tape)[0] if isinstance(entry, Op)]


def most(gpu: VirtualGpu) -> dict[str, float]:
    """Of each kind of memory, the most that there was at once."""
    found, every = {}, lives(gpu.tape)
    for kind in KINDS:
        mine = [life for life in every if life.kind == kind]
        changes = [(life.places.start, life.nbytes) for life in mine]
        changes += [(life.places.stop, -life.nbytes) for life in mine]
        found[kind] = max(accumulate(change for _, change in sorted(changes)), default=0)
    return found


def in_forward(gpu: VirtualGpu, block: int) -> tuple[float, float]:
    """Seconds that a block is computed with in the forward, and those in which it is gathered."""
    ops = operators(gpu)
    computing = [op for op in ops if op.stream == COMPUTE]
    begin, end = (
        next(op.start for op in computing if any(b.label == _gather(at) for b in op.reads))
        for at in (block, block + 1)
    )
    computed = sum(op.end - op.start for op in computing if begin <= op.start < end)
    return computed, next(op.end - op.start for op in ops if op.sent and op.label == _gather(block))


def _gather(block: int) -> str:
    return f"all-gather 'blocks.{block}'"

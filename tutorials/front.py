"""Draws what the README's first screen shows: the memory of a GPU, and a step of four blocks.

    python tutorials/front.py

The bars are the formulas' (page 30). The step is a run of the engine on the virtual GPU.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from minifsdp.sim.tape import COMPUTE, Op
from minifsdp.sim.training.models import Block, Gpt, Job, next_token
from minifsdp.sim.views.svg import WIDTH, Drawing
from tutorials import draw, formulas
from tutorials.virtual_run import operators, run

FOLDER = ROOT / "tutorials"
PARAMS, GPUS = 7e9, 64
UNIT = PARAMS / 32  # of as many blocks, as models of this size have
STEP = (
    "--model tutorials.front:four_blocks --gpu a100-80 --nodes 2 --network 1600 --batch 4 "
    "--seq 1024 --limit 2"
)
LEFT, ROW = 68, 30
HEIGHTS = {"blue": (0, 9), "orange": (0, 9), "lightgray": (0, 24)}  # in a row: from where, how high
LEGEND = {
    "blue": "gather the block from all GPUs",
    "green": "forward",
    "purple": "backward",
    "orange": "average its gradient; each GPU keeps a part",
    "lightgray": "the block is whole; elsewhere it is freed",
}


def memory() -> dict[str, dict[str, float]]:
    """GB on each GPU for 7 billion parameters and Adam: with DDP, and with FSDP."""
    bars = {}
    for name, strategy in (("DDP", "no_shard"), (f"FSDP, {GPUS} GPUs", "full_shard")):
        each = PARAMS / formulas.sharers(strategy, GPUS) / 1e9
        bars[name] = {"parameters": 4 * each, "gradients": 4 * each, "Adam's averages": 8 * each}
    whole = formulas.gathered("full_shard", PARAMS, UNIT, UNIT) / 1e9
    bars[name]["two whole blocks at a time, in 16 bits"] = whole
    return bars


def four_blocks() -> Job:
    """A GPT that is small enough to draw."""
    return Job(lambda: Gpt(2048, 4, 16, 1024), (Block,), next_token)


Piece = tuple[str, float, float]  # what it is, by the colours of LEGEND; from when to when


def pieces(ops: list[Op], unit: str) -> Iterator[Piece]:
    """What a step does for a unit: gathered, used, and gathered and used again; then reduced."""
    gathers = [op for op in ops if op.sent and op.label == f"all-gather '{unit}'"]
    for gather, colour in zip(gathers, ("green", "purple"), strict=True):
        uses = [op for op in ops if op.stream == COMPUTE and {*op.reads} & {*gather.writes}]
        begin, end = min(op.start for op in uses), max(op.end for op in uses)
        yield "lightgray", gather.start, end
        yield "blue", gather.start, gather.end
        yield colour, begin, end
    (reduce,) = (op for op in ops if op.sent and op.label == f"reduce '{unit}'")
    yield "orange", reduce.start, reduce.end


def step(path: Path, title: str, rows: dict[str, list[Piece]]) -> None:
    """A row for each unit: above what travels between GPUs, below what is computed."""
    drawing = Drawing(title)
    drawing.text(draw.MARGIN, 20, title, "title")
    times = [time for row in rows.values() for _, *both in row for time in both]
    scale = (WIDTH - LEFT - draw.MARGIN) / (max(times) - min(times))
    for number, (name, row) in enumerate(rows.items()):
        y = 32 + number * ROW
        drawing.text(LEFT - 8, y + 16, name, "lane")
        for kind, begin, end in sorted(row, key=lambda piece: piece[0] != "lightgray"):
            top, height = HEIGHTS.get(kind, (11, 13))
            x = LEFT + (begin - min(times)) * scale
            drawing.box(
                x, y + top, (end - begin) * scale, height, kind, tip=f"{name}: {LEGEND[kind]}"
            )
    drawing.legend(LEFT, LEGEND)
    drawing.write(path)


def main() -> None:
    """Write front_memory.svg and front_step.svg."""
    draw.bars(
        FOLDER / "front_memory.svg",
        "Memory of one GPU that trains 7 billion parameters with Adam (activations not counted)",
        memory(),
        "{:.1f} GB".format,
    )
    ops = operators(run(STEP)[1])
    step(
        FOLDER / "front_step.svg",
        "One training step with FSDP: each block of the model is whole only while it is needed",
        {f"block {i}": list(pieces(ops, f"blocks.{i}")) for i in range(4)},
    )


if __name__ == "__main__":
    main()

"""Make explorer.html: one page to try FSDP's settings in, without a server and without a GPU.

    python tutorials/explorer.py      # `make tutorials` does it, too

Every combination of the settings below is run on the virtual GPU (minifsdp/sim), and what is drawn
of it is packed into the page: one step, reduced to what a unit does as a whole (its all-gather, its
forward, its backward, its reduction, its free), and three curves of memory. explorer_page.html
draws it.

Numbers are packed as they are, not compressed: what zlib writes depends on its version, and a page
that is made again has to be the same, byte for byte.
"""

import base64
import itertools
import json
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # as for `python -m minifsdp.sim` in the repository's root

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import HOST, STREAMS, Entry, Memory, Phase
from minifsdp.sim.training.models import Block, Gpt, Job, next_token
from minifsdp.sim.views.html import fill_in
from minifsdp.sim.views.pieces import CAST, FREE, OTHER, pieces
from minifsdp.sim.views.spans import LIMITER, LOSS, OPTIMIZER, STALL
from minifsdp.sim.views.timeline import svg
from tutorials import train_gpt


def demo() -> Job:
    """The model that `make demo` trains, and its loss."""

    def loss(model: nn.Module, batch: int, length: int) -> torch.Tensor:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    return Job(lambda: train_gpt.GPT(layers=4, width=128), (train_gpt.Block,), loss)


def large() -> Job:
    """Six blocks of gpt-7b, between its embeddings and its head. It has 32 of them, all alike; a
    picture of six is the same and can be read, and a run of six takes a fifth of the time."""
    return Job(lambda: Gpt(width=4096, layers=6, heads=32), (Block,), next_token)


class Model(NamedTuple):
    """What is run, and which values of each setting. The first of these is the page's default."""

    title: str
    about: str
    options: str
    settings: dict[str, list[str]]


SCHEDULE = {
    "limit": ["2", "1", "3", "none"],
    "backward": ["pre", "post", "none"],
    "forward": ["none", "pre"],
    "strategy": ["full_shard", "shard_grad_op", "no_shard"],
    "unit": ["block", "model"],
}
MODELS = {
    "large": Model(
        "a large GPT",
        "1.4 billion parameters: six blocks as wide as those of a model of 7 billion. "
        "2 nodes with 8 A100 of 40 GB each, texts of 1,024 tokens.",
        "--model tutorials.explorer:large --nodes 2 --gpus 8 --seq 1024 --steps 2",
        SCHEDULE
        | {"network": ["400", "100"], "batch": ["4", "1"]}
        | {"precision": ["bf16"], "recompute": ["none", "full"]},
    ),
    "demo": Model(
        "the GPT of make demo",
        "0.9 million parameters in four blocks. 2 nodes with one A100 each, texts of 64 tokens.",
        "--model tutorials.explorer:demo --nodes 2 --gpus 1 --seq 64 --steps 2",
        SCHEDULE
        | {"network": ["10", "100"], "batch": ["16", "256"]}
        | {"precision": ["fp32", "bf16"], "recompute": ["none"]},
    ),
}
LANES = (HOST, *STREAMS)
KINDS = (
    *("all-gather", "forward", LOSS, "backward", "reduce", "all-reduce", CAST, OPTIMIZER),
    *(LIMITER, STALL, FREE, OTHER),
)
LEVELS = ("reserved", "active", "allocated")
FIGURES = (
    *("step", "compute", "communication", "exposed communication", "idle", "bytes sent"),
    *("host stalls in the limiter", "other host stalls", "peak unsharded units"),
    *("peak reserved", "peak active", "peak allocated", "cudaMallocs", "retries"),
    *("tokens/s per GPU", "MFU", "binds", "advice"),
)
"""Of those of `python -m minifsdp.sim --json`, what the page has."""
COLUMNS = 128
"""Of the curves of memory, over a step."""
FULL = 2**16 - 1
"""Times are packed as this many parts of a step."""


def canonical(settings: dict[str, str]) -> dict[str, str]:
    """Settings that give the same run, with the defaults for those that make no difference there.
    tests/test_explorer.py runs both."""
    schedule = ["limit", "backward", "forward"]
    ignored = {"full_shard": [], "shard_grad_op": schedule[:2], "no_shard": schedule}
    names = ignored[settings["strategy"]]
    if settings["unit"] == "model":  # there is no other unit to gather ahead, and the root keeps
        # its parameters until the backward anyway
        names = schedule + ["strategy"] * (settings["strategy"] != "no_shard")
    return settings | {name: SCHEDULE[name][0] for name in names}


def command(model: str, settings: dict[str, str]) -> str:
    """The options of a run, as on the command line of minifsdp.sim."""
    return " ".join([MODELS[model].options, *(f"--{name} {v}" for name, v in settings.items())])


def run(line: str) -> tuple[dict[str, Any], list[Entry]]:
    """The figures of a run, and the entries of its tape.

    Raises:
        RuntimeError: it does not fit. The page has no words for that; choose other values.
    """
    figures, gpu = measure(parser().parse_args(line.split()))
    if gpu is None:
        raise RuntimeError(f"{line}: does not fit on the virtual GPU: {figures['why']}")
    return figures, gpu.tape


def packed(line: str) -> tuple[str, bytes]:
    """A run as the page has it: its figures as JSON, and its step as bytes."""
    figures, tape = run(line)
    entries, start, end = last_step(tape)
    drawn = pieces(entries)
    units = list(dict.fromkeys(piece.unit for piece in drawn))

    def part(time: float) -> int:
        return round((time - start) / (end - start) * FULL)

    words = [len(drawn)]
    for piece in drawn:
        lane, kind = LANES.index(piece.lane), KINDS.index(piece.kind)
        words += [lane | kind << 3 | units.index(piece.unit) << 8, len(piece.waits)]
        words += map(part, (piece.launched, piece.start, piece.end))
        words += itertools.chain(*((number, part(time)) for number, time in piece.waits))
    phases = {e.name: part(e.time) for e in entries if isinstance(e, Phase)}
    its = {"figures": {n: figures[n] for n in FIGURES}, "units": units, "phases": phases}
    return json.dumps(its), struct.pack(f"<{len(words)}H", *words) + curves(entries, start, end)


def curves(entries: list[Entry], start: float, end: float) -> bytes:
    """The highest level in each column of a step: for each of LEVELS a byte for each column, in
    parts of the largest reserved memory, rounded up."""
    memory = [entry for entry in entries if isinstance(entry, Memory)]
    most = max(entry.reserved for entry in memory)
    columns = [min(int((e.time - start) / (end - start) * COLUMNS), COLUMNS - 1) for e in memory]
    columns = [0, *columns[1:], COLUMNS - 1]  # what was there first was there before
    rows = [bytearray(COLUMNS) for _ in LEVELS]
    for place, entry in enumerate(memory):
        for row, level in zip(rows, LEVELS, strict=True):
            height = -(-getattr(entry, level) * 255 // most)
            these = slice(columns[place], columns[place + 1] + 1)
            row[these] = bytes(max(height, other) for other in row[these])
    return b"".join(rows)


def packed_all() -> tuple[dict[str, Any], bytes]:
    """What explorer_page.html needs: settings, and figures of all runs; and their steps.

    Runs that are equal are there once. `index` of a model has for each combination of its settings,
    the last of them fastest, the number of its run.
    """
    combinations = {
        name: [
            dict(zip(model.settings, values, strict=True))
            for values in itertools.product(*model.settings.values())
        ]
        for name, model in MODELS.items()
    }
    lines = {name: [command(name, canonical(s)) for s in c] for name, c in combinations.items()}
    every = list(dict.fromkeys(itertools.chain(*lines.values())))
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        done = dict(zip(every, pool.map(packed, every, chunksize=8), strict=True))
    numbers = {run: number for number, run in enumerate(dict.fromkeys(done.values()))}
    starts = itertools.accumulate((len(step) for _, step in numbers), initial=0)
    indices = {name: [numbers[done[line]] for line in lines[name]] for name in MODELS}
    models = {name: its._asdict() | {"index": indices[name]} for name, its in MODELS.items()}
    runs = [json.loads(text) | {"at": at} for (text, _), at in zip(numbers, starts, strict=False)]
    known = {"lanes": LANES, "kinds": KINDS, "levels": LEVELS, "columns": COLUMNS, "full": FULL}
    return known | {"models": models, "runs": runs}, b"".join(step for _, step in numbers)


def main() -> None:
    """Write explorer.html, and explorer.svg for those who read where no script runs."""
    known, steps = packed_all()
    data = json.dumps(known, separators=(",", ":"))
    places = {"data": data, "steps": base64.b64encode(steps).decode()}
    (HERE / "explorer.html").write_text(fill_in(HERE / "explorer_page.html", places))
    settings = {name: values[0] for name, values in MODELS["large"].settings.items()}
    tapes = {
        f"{MODELS['large'].title}, {words}": run(command("large", settings | {"limit": limit}))[1]
        for words, limit in (("no limit", "none"), ("a limit of 2 units", "2"))
    }
    (HERE / "explorer.svg").write_text(svg(tapes))


if __name__ == "__main__":
    main()

"""Make explorer.html: one page to try FSDP's settings in, without a server and without a GPU.

    python tutorials/explorer.py      # `make tutorials` does it, too

Every combination of the settings below is run on the virtual GPU (minifsdp/sim). What does not fit
is run once more on a GPU with enough memory, so that the page can say how much is missing.
explorer_data.py packs what is drawn of a run; explorer_page/ has the page's parts.
"""

import base64
import itertools
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # as for `minifsdp sim` in the repository's root

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure
from minifsdp.sim.figures.advice import WORTH
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.tape import Entry
from minifsdp.sim.training.models import Block, Gpt, Job, next_token
from minifsdp.sim.views.html import fill_in
from minifsdp.sim.views.lanes import ORDER
from minifsdp.sim.views.timeline import svg
from tutorials import train_gpt
from tutorials.explorer_data import KNOWN, Packed, packed, together
from tutorials.javascript import javascript

PARTS, README = HERE / "explorer_page", HERE.parent / "minifsdp" / "sim" / "README.md"


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
    job: Callable[[], Job]
    options: str
    gpus_per_node: int
    settings: dict[str, list[str]]


GPU = "a100-40"
SCHEDULE = {
    "limit": ["true", "1", "2", "none"],
    "backward": ["pre", "post", "none"],
    "forward": ["none", "pre"],
}
MODELS = {
    "large": Model(
        "a large GPT",
        "1.4 billion parameters: six blocks as wide as those of a model of 7 billion, on A100s "
        "with 40 GB, 8 in a node",
        large,
        f"--model tutorials.explorer:large --gpu {GPU} --gpus 8 --steps 2",
        8,
        SCHEDULE
        | {"strategy": ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]}
        | {"unit": ["block", "model"], "nodes": ["2", "1", "8"], "network": ["400", "100"]}
        | {"batch": ["4", "1"], "seq": ["1024", "4096"], "precision": ["bf16"]}
        | {"recompute": ["none", "full"], "offload": ["no", "yes"]},
    ),
    "demo": Model(
        "the GPT of make demo",
        "0.9 million parameters in four blocks, on A100s with 40 GB, one in a node",
        demo,
        f"--model tutorials.explorer:demo --gpu {GPU} --gpus 1 --steps 2",
        1,
        SCHEDULE
        | {"strategy": ["full_shard", "shard_grad_op", "no_shard"]}
        | {"unit": ["block", "model"], "nodes": ["2"], "network": ["10", "100"]}
        | {"batch": ["16", "256"], "seq": ["64"], "precision": ["fp32", "bf16"]}
        | {"recompute": ["none"], "offload": ["no"]},
    ),
}
ONLY_WITH = {
    "backward": {"seq": ["1024", "64"], "recompute": ["none"], "offload": ["no"]},
    "forward": {"seq": ["1024", "64"], "recompute": ["none"], "offload": ["no"]},
}
"""With which values of others a setting is varied. Six schedules of prefetches beside all others
would be three times as many runs, and a page of 4 MB; what they do can be seen with the defaults of
these three."""
ADVISED = (
    *("limit", "backward", "forward", "strategy", "unit", "batch"),
    *("precision", "recompute", "offload"),
)
"""Settings that one can change at once; others are the model, its texts, or other machines."""


def varied(name: str, settings: dict[str, str]) -> bool:
    """Whether a setting has other values than its default beside these."""
    return all(settings[other] in its for other, its in ONLY_WITH.get(name, {}).items())


def canonical(settings: dict[str, str]) -> dict[str, str]:
    """Settings that give the same run, with the defaults for those that make no difference there,
    or are not varied. tests/test_explorer.py runs both."""
    its = settings | {n: SCHEDULE[n][0] for n in ONLY_WITH if not varied(n, settings)}
    if its["nodes"] == "1":  # nothing leaves the node
        its["network"] = "400"
    schedule = ["limit", "backward", "forward"]
    ignored = {"shard_grad_op": schedule[:2], "no_shard": schedule}.get(its["strategy"], [])
    if its["unit"] == "model":  # there is no other unit to gather ahead, and the root keeps
        # its parameters until the backward anyway
        ignored = schedule
        if its["strategy"] == "shard_grad_op":
            its["strategy"] = "full_shard"
    return its | {name: SCHEDULE[name][0] for name in ignored}


def command(model: str, settings: dict[str, str]) -> str:
    """The options of a run, as on the command line of minifsdp.sim."""
    return " ".join([MODELS[model].options, *(f"--{name} {v}" for name, v in settings.items())])


def combinations(model: str) -> list[dict[str, str]]:
    """All settings of a model; the last one changes fastest."""
    its = MODELS[model].settings
    return [dict(zip(its, values, strict=True)) for values in itertools.product(*its.values())]


def run(line: str) -> tuple[dict[str, Any], list[Entry]]:
    """The figures of a run, and the entries of its tape. If it does not fit (``"fits"``), they are
    those on a GPU with enough memory."""
    options = parser().parse_args(line.split())
    figures, gpu = measure(options)
    if gpu is not None:
        return figures, gpu.tape
    figures, gpu = measure(options, taken=-(2**50))
    assert gpu is not None
    return figures | {"fits": False}, gpu.tape


def packed_run(line: str) -> Packed:
    """A run as explorer_data.py packs it."""
    return packed(*run(line))


def advice(
    model: str, settings: dict[str, str], figures_of: Callable[[dict[str, str]], dict[str, Any]]
) -> tuple[str, str] | None:
    """The one setting to change that makes the step fastest, of those that the page has and that
    fit; None if it is not by more than WORTH, nor makes it fit."""
    here = figures_of(settings)
    best, speed = None, here["tokens/s per GPU"] * (1 + WORTH) if here["fits"] else 0.0
    for name in ADVISED:
        for value in MODELS[model].settings[name] if varied(name, settings) else []:
            there = figures_of(settings | {name: value})
            if there["fits"] and there["tokens/s per GPU"] > speed:
                best, speed = (name, value), there["tokens/s per GPU"]
    return best


def sizes(model: str) -> dict[str, int]:
    """Parameters of a model, of its largest block, and of what is in no block."""
    job = MODELS[model].job()
    with torch.device("meta"):
        module = job.build()
    blocks = [
        sum(p.numel() for p in part.parameters())
        for part in module.modules()
        if isinstance(part, job.blocks)
    ]
    whole = sum(p.numel() for p in module.parameters())
    return {"params": whole, "unit": max(blocks), "root": whole - sum(blocks)}


def machine() -> dict[str, float]:
    """Constants of the cluster that formulas on the page need."""
    gpu = GPUS[GPU]
    around = Cluster(gpu)
    return {
        "name": f"A100 with {GPU.rpartition('-')[2]} GB",
        "capacity": around.capacity,
        "bf16": gpu.flops,
        "fp32": gpu.flops_fp32,
        "links": gpu.links * around.links_reached,
        "reached": around.links_reached,
        "pcie": gpu.pcie * around.links_reached,
        "quiet": around.quiet,
    }


def predicted() -> dict[str, str]:
    """How near predictions were to runs that nothing was chosen by: a row of the table that
    `make predictions` has written into minifsdp/sim/README.md."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in README.read_text().splitlines()
    ]
    head = next(cells for cells in rows if cells[:2] == ["runs", "family"])
    (row,) = [cells for cells in rows if cells[:2] == ["held out", "all"]]
    return dict(zip(head, row, strict=True))


def packed_all() -> dict[str, Any]:
    """What the page needs: settings, and all runs.

    Runs that are equal are there once. `index` of a model has for each combination of its settings
    the number of its run, and `advice` the number of a setting and of its value, plus one; or 0.
    """
    near = predicted()  # before the runs, which take minutes
    lines = {m: [command(m, canonical(its)) for its in combinations(m)] for m in MODELS}
    every = list(dict.fromkeys(itertools.chain(*lines.values())))
    # Not forked: torch has threads by now.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        done = dict(zip(every, pool.map(packed_run, every, chunksize=8), strict=True))
    numbers = {run: number for number, run in enumerate(dict.fromkeys(done.values()))}
    models = {}
    for name, model in MODELS.items():
        index = [numbers[done[line]] for line in lines[name]]
        advised = bytearray()
        for its in combinations(name):
            found = advice(name, its, lambda s, m=name: done[command(m, canonical(s))].figures)
            advised.append(
                found is not None
                and ADVISED.index(found[0]) * 4 + model.settings[found[0]].index(found[1]) + 1
            )
        models[name] = {
            "title": model.title,
            "about": model.about,
            "options": model.options,
            "gpus": model.gpus_per_node,
            "settings": model.settings,
            "sizes": sizes(name),
            "index": base64.b64encode(b"".join(i.to_bytes(2, "little") for i in index)).decode(),
            "advice": base64.b64encode(advised).decode(),
        }
    its = {"models": models, "only_with": ONLY_WITH, "advised": ADVISED, "worth": WORTH}
    its |= {"gpu": GPU, "machine": machine(), "predicted": near, "lanes_in_order": ORDER}
    return KNOWN | its | together(list(numbers))


def page(data: str) -> str:
    """explorer.html, with these data."""
    parts = {part.name: part.read_text() for part in sorted(PARTS.glob("*.js"))}
    formulas = {"formulas.js": javascript((HERE / "formulas.py").read_text(), "sheet")}
    return fill_in(PARTS / "page.html", {"data": data} | parts | formulas)


def main() -> None:
    """Write explorer.html, and explorer.svg for those who read where no script runs."""
    data = json.dumps(packed_all(), separators=(",", ":"))
    (HERE / "explorer.html").write_text(page(data))
    settings = {name: values[0] for name, values in MODELS["large"].settings.items()}
    tapes = {
        f"{MODELS['large'].title}, {words}": run(command("large", settings | {"limit": limit}))[1]
        for words, limit in (("no limit", "none"), ("with the limiter", "true"))
    }
    (HERE / "explorer.svg").write_text(svg(tapes))


if __name__ == "__main__":
    main()

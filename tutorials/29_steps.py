"""From one file to the core: python tutorials/29_steps.py; the page is 29_steps.md."""

# %% [markdown]
# # One program that grows
#
# The [FSDP in one file](06_one_file.md) is whole, and slow. Eighteen steps, most of them of twenty
# to thirty new lines, turn it into an FSDP that overlaps, waits, prefetches, survives an exception,
# lets checkpoints run a forward again, computes in bfloat16, shards within machines and keeps the
# names of parameters. After each step the program is whole again, and trains as
# DistributedDataParallel does. These are the steps:
#
# {{ steps }}
#
# A step is a diff, and the diff is at the end of the page that it belongs to.
# `make steps` writes the nineteen programs to `build/steps/`, and tests them. Open two of them side
# by side, or the last one by itself: it is what you have read about on all these pages.
#
# First of all, is it still right? Each program trains a small GPT whose head is its embedding, on
# two ranks with different data, and so does DDP:

# %% [hidden]
import ast
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import grow
import torch
import torch.distributed as dist
import torch.nn.functional as F
from draw import bars
from launch import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from train_gpt import GPT, Block

from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.streams import make_streams
from minifsdp.sim.training import models

PICTURE = Path(__file__).with_suffix(".svg")
CORE = Path(__file__).parents[1] / "minifsdp" / "core"
LAST = grow.NAMES[-1]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(layers=3, width=64)
    model.head.weight = model.token.weight
    return model


def train(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    sampler = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        rows = torch.randint(256, (4, 33), generator=sampler).to(torch.get_default_device())
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lines(name: str) -> int:
    return sum(bool(line.strip()) for line in grow.text(name).split('"""', 2)[2].splitlines())


# %%
@on_ranks(2)
def against_ddp() -> None:
    reference = gpt()
    expected = train(DDP(reference))
    for name in grow.NAMES:
        model = gpt()
        engine = grow.load(name).fsdp(model, Block)
        losses, found = train(model), engine.full_params()
        same = [torch.equal(found[key], param) for key, param in reference.named_parameters()]
        assert losses == expected and all(same), name
        if dist.get_rank() == 0:
            say = f"{len(losses)} losses and {len(same)} parameters are bit-equal to DDP's"
            print(f"{name:20} {lines(name):3} lines; {say}")


# %% [markdown]
# ## What each step is worth
#
# Now in virtual time: a GPT of 1.3 billion parameters in bfloat16 on two machines of 8 A100 GPUs,
# with 400 Gbit/s between them. Before you read on: which step saves most time, and which most
# memory? (A program that takes as much of both as the one before it is not printed.)


# %% [hidden]
def virtual(module: ModuleType, layers: int = 24, shape: Any = None, **settings: Any) -> VirtualGpu:
    """Three steps of a program on the virtual cluster. ``shape``: of a mesh."""
    with cluster("a100-40", nodes=2, gpus_per_node=8, network=50e9) as gpu:
        model = models.Gpt(2048, layers, 16).bfloat16()
        assert layers < 24 or round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 1.3
        module.Streams = partial(make_streams, gpu)
        if shape is not None:
            settings["mesh"] = init_device_mesh("cpu", shape)
        module.fsdp(model, models.Block, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            tokens = torch.zeros(2, 1024, dtype=torch.long)
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
    return gpu


SETTINGS = {
    "13_strategies, units stay": ("13_strategies", {"reshard_after_forward": False}),
    "15_hybrid, shards in a machine": ("15_hybrid", {"shape": (2, 8)}),
}


# %%
def what_each_is_worth() -> None:
    runs = {name: (name, {}) for name in grow.NAMES} | SETTINGS
    figures, printed = {}, {}
    for title, (name, settings) in sorted(runs.items(), key=order):
        gpu = virtual(grow.load(name), **settings)
        step, reserved = (gpu.report()[key] for key in ("step", "peak reserved"))
        shown = f"{step * 1e3:5.1f} ms, {reserved / 2**30:4.1f} GiB reserved"
        if settings or shown not in printed.values():
            print(f"{title:30} {shown}")
            printed[title] = shown
        figures[title] = step, reserved, gpu.report()["peak unsharded units"]
        assert gpu.races() == []
    draw(figures, printed)


# %% [hidden]
def order(run: Any) -> int:
    return grow.NAMES.index(run[1][0])


def draw(rows: Any, titles: Any) -> None:
    times = {title: {"a step": rows[title][0] * 1e3} for title in titles}
    bars(PICTURE, "Milliseconds of a step, after each step of the program that changes something",
         times, lambda n: f"{n:.1f} ms")  # fmt: skip
    time, reserved, alive = ([rows[name][i] for name in grow.NAMES] for i in range(3))
    assert len({*time[:4]}) == 1 and 0.9 * time[0] > time[4] > time[5] > time[6] > 0.98 * time[4]
    assert reserved[8] < 0.6 * reserved[7] and 0.3 < (reserved[3] - reserved[2]) / 2**30 < 0.35
    assert 1.01 * time[7] > time[8] == time[9] == time[10] > time[7] and alive[8] == 3
    assert time[11] < 0.75 * time[10] and all(rows[it][0] < 0.9 * time[13] for it in SETTINGS)
    assert time[13] == time[14] == time[15] and 1.03 < time[18] / time[15] < 1.07 and alive[4] == 50


# %% [markdown]
# ![Bars of the time of a step. One file takes 312 ms, with overlap 274, with reductions beside the
# backward 271, with a limiter 272, with prefetching in the backward 200, and 198 when the root
# stays. Where all units stay it is 167, with shards in a machine 142, with rows
# 209.](29_steps.svg)
#
# - **A stream of its own** for gathers gains nothing as long as each gather waits for the
#   computation before it. It takes a third of a GiB, because each stream has memory of its own.
# - **Overlap** hides a part of the gathers at once, because the host runs ahead. It runs so far
#   ahead that memory for 50 units is reserved: the whole model, forward and backward. That is
#   fairscale's problem, in your own program.
# - **Reductions beside the backward** gain next to nothing, by themselves. NCCL does one thing at a
#   time. The next gather waits for the reduction, and the computation waits for that gather.
# - **The limiter** gives the memory back, for half a percent of the time.
# - **Prefetching in the forward** gains nothing here: the host is ahead of the GPU, and asks for
#   the next gather early enough by itself. It is for a host that is slow.
# - **Prefetching in the backward** gains most of all. It needs the steps before it: the gather is
#   asked for before the reduction is, so that the reduction is hidden too.
# - **Strategies** trade memory for gathers, and **hybrid** sharding keeps gathers off the network
#   between machines. (The model is in bfloat16 from the start here, so that *low precision* changes
#   nothing.) **Rows** cost 5 %: what has been gathered has to be put in order, which is a
#   copy of every parameter. FSDP2 makes the same copy.
#
# ## What breaks without each wait
#
# Apart from the limiter, the program has five places where something waits for something else, and
# beside each it says why. On a CPU three of them do nothing. Here each is left out in turn, and the
# virtual GPU is asked for races: memory that one stream reads or writes while another one still
# uses it.

# %% [hidden]
WAITS = {
    "nothing": "",
    "a forward's wait for its gather": "unit.wait_for_unshard()",
    "the gathers' wait for the optimizer":
        "self.streams.unshard.wait_event(self.streams.compute.record_event())",
    "the reduction's wait for the gradient":
        "streams.reduce.wait_event(streams.compute.record_event())",
    "record_stream": "self.streams.compute.record_stream(self.flat_param.data)",
    "the optimizer's wait for reductions": "self.event.wait()",
}  # fmt: skip


# %%
def without_a_wait() -> None:
    for what, line in WAITS.items():
        source, module = grow.text("11_backward_prefetch"), ModuleType("without")
        exec(source.replace(f" {line}\n", " pass\n", 1) if line else source, vars(module))
        races = virtual(module, layers=4).races()
        print(f"without {what:38} {'a race' if races else 'no race'}")
        assert bool(races) == bool(line), what


# %% [markdown]
# ## It is the core
#
# The last program and [`minifsdp/core/`](../minifsdp/core/__init__.py) have the same concepts under
# the same names. This is where each class, and each method that is more than a line there, is in
# the core:


# %%
def where_it_is() -> None:
    for name, files in same_names().items():
        print(f"{name:12}", ", ".join(files))


# %% [hidden]
MOVED = {"show_views", "hide_views", "unshard", "reshard", "wait_for_unshard", "unflatten"}


def same_names() -> dict[str, list[str]]:
    """The classes of the last program, and the files of the core with the same names."""
    there = {name: p.name for p in CORE.glob("*.py") for name in names(ast.parse(p.read_text()))}
    classes = [n for n in ast.parse(grow.text(LAST)).body if isinstance(n, ast.ClassDef)]
    found = {node.name: [there[node.name]] for node in classes}
    inside = [name for node in classes if node.name == "Unit" for name in names(node)]
    found["Unit"] += [f"{there[name]} ({name})" for name in inside if name in MOVED]
    return found


def names(node: Any) -> list[str]:
    return [part.name for part in node.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]


# %% [markdown]
# What your last five steps add is not in the core but around it, because each is only one of
# several ways to do a thing: low precision is [`precision.py`](../minifsdp/precision.py), hybrid
# sharding is in [`strategies.py`](../minifsdp/strategies.py), and rows with their names, as
# DTensors, are [`rows.py`](../minifsdp/rows.py). The core also has what your program lacks:
#
# - a module may return any structure of tensors, and not just one (`outputs.py`);
# - a unit whose parameters are frozen, and a backward that begins inside of a unit (`hooks.py`,
#   `backward.py`);
# - the first backward has targets too, in the reverse order of the forward (`prefetch.py`);
# - users choose units by a policy, and what cannot be sharded is refused by name (`auto_wrap.py`);
# - what else there is to do at a moment is a layer ([28](28_layers.md)).
#
# So read the core now. `core/__init__.py` says in which order.
#
# ## Predict, then run
#
# 1. The limit is raised from two units to three. Is the step shorter?
# 2. Step 6 is left out: gathers are prefetched, and each reduction is waited for at once. How much
#    of what prefetching gains is left?
# 3. Which of the eighteen steps would you leave out on a machine without a GPU, whose ranks compute
#    on the CPU?
#
# <details><summary>Answers</summary>
#
# 1. By 1 % at most. One unit ahead hides all that this network lets it hide.
# 2. Two thirds. The backward then stands still while each gradient is reduced.
# 3. The second, which is for GPUs, and the limiter. It has hardly any use there: a CPU frees memory
#    at once, and has no queue that the host could fill. (It still says how much may be prefetched.)
#    Streams have one use: a gather is started in one place and waited for in another.
#
# </details>


# %% [hidden]
def answers() -> None:
    program = grow.load("11_backward_prefetch")
    step = virtual(program).report()["step"]
    assert 0.98 * step < virtual(program, limit=3).report()["step"] < 1.001 * step  # 1.
    waiting, at_once = ModuleType("waiting"), "reduce.submit(self.launch)"
    exec(
        grow.text("11_backward_prefetch").replace(at_once, f"{at_once}; self.event.wait()"),
        vars(waiting),
    )
    before = virtual(grow.load("8_limiter")).report()["step"]
    left = (before - virtual(waiting).report()["step"]) / (before - step)
    assert 0.6 < left < 0.7  # 2.
    assert program.CpuStream().record_event().query()  # 3. what is freed is free


def main() -> None:
    against_ddp()
    what_each_is_worth()
    without_a_wait()
    where_it_is()
    answers()


if __name__ == "__main__":
    main()

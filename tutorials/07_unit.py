"""Units: python tutorials/07_unit.py; the page is 07_unit.md."""

# %% [markdown]
# # Units: how much to gather at once
#
# Modules whose parameters are gathered together and freed together are a *unit*. You decide where
# the borders of the units are. The whole model may be one unit, or each block, or each half of a
# block: its attention and its MLP. Small units save memory, large ones save messages. Which is the
# fastest?
#
# ## Saying what the units are
#
# A *policy* is asked about each module whether it is to be a unit. `ModuleWrapPolicy({Block})` says
# yes to every `Block`. Here is the GPT of `make demo` with it. `explain` is a function of minifsdp
# that lists the units:

# %% [hidden]
import functools
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import nn
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, explain
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.tape import Op
from minifsdp.sim.training.presets import find

TIME = Path(__file__).with_suffix(".svg")
MEMORY = TIME.with_stem("07_unit_memory")
NAMES = {"model": "the whole model", "block": "each block", "part": "each half of a block"}


# %%
@on_ranks(2)
def blocks_are_units() -> None:
    model = FSDP(GPT(layers=4, width=128), auto_wrap_policy=ModuleWrapPolicy({Block}))
    if dist.get_rank() == 0:
        explain(model)


# %% [markdown]
# Units may lie inside other units, and a parameter belongs to the innermost one around it. What is
# in no block (the embeddings, the last norm and the head) belongs to the *root*, the model itself.
#
# ## How large?
#
# Take a larger GPT, of 1.3 billion parameters in 24 blocks, on 4 nodes of 8 virtual GPUs. (The
# half blocks leave two norms over in each block, which are a small unit then.) A collective is
# *exposed* while the GPU has nothing to compute because it waits for it.


# %%
RUN = "--model gpt-1.3b --nodes 4 --network 1600 --batch 2 --seq 512"


@functools.cache
def run(unit: str, words: str = RUN) -> VirtualGpu:
    return simulate(parser().parse_args([*words.split(), "--unit", unit]))


def three_sizes() -> None:
    for unit, name in NAMES.items():
        step = run(unit).report()["step"] * 1e3
        took = [op.end - op.start for op in run(unit).tape if isinstance(op, Op) and op.sent]
        print(
            f"{name:20} {step:4.0f} ms a step; {len(took) // 3:3} collectives in it, "
            f"the fastest takes {min(took) * 1e3:5.2f} ms"
        )


# %% [hidden]
PARTS = {"computing": "compute", "a collective is exposed": "exposed communication", "idle": "idle"}


def draw() -> None:
    time, memory = {}, {}
    for unit, name in NAMES.items():
        report = run(unit).report()
        time[name] = {part: report[key] * 1e3 for part, key in PARTS.items()}
        peak = report["peak allocated is"]
        whole = peak["gathered parameters"] + peak.get("unsharded gradients", 0)
        memory[name] = {
            "whole parameters and gradients": whole / 1e9,
            "all else": (report["peak allocated"] - whole) / 1e9,
        }
    bars(TIME, "where the time of a step goes, by what is a unit", time, "{:.0f} ms".format)
    bars(MEMORY, "memory of a GPU at its fullest, by what is a unit", memory, "{:.1f} GB".format)
    computing = [round(row["computing"]) for row in time.values()]
    exposed = [round(row["a collective is exposed"]) for row in time.values()]
    assert (computing, exposed) == ([70, 75, 73], [32, 6, 36])  # the picture's description
    blocks = [part for part in gpt_of("gpt-1.3b").modules() if type(part).__name__ == "Block"]
    assert len(blocks) == 24


def gpt_of(preset: str) -> nn.Module:
    with torch.device("meta"):
        return find(preset, None, None).build()


# %% [markdown]
# ![Three bars of time. The whole model: 70 ms of computing and 32 of waiting. Each block, the
# shortest: 75 and 6. Each half of a block, the longest: 73 and 36.](07_unit.svg)
#
# ![Three bars of memory. The whole model: 8.5 GB, nearly all of it whole parameters and gradients.
# Each block 3.1 GB, each half of a block 3.0 GB, with small shares of those.](07_unit_memory.svg)
#
# - **The whole model.** Nothing can be computed before all parameters have arrived, and nothing is
#   reduced before the last gradient is there. So the GPU waits for the network at both ends of the
#   step. In between it holds the whole model and all of its gradients.
# - **Each block.** While the GPU computes with one block, the next one is gathered. Most of the
#   communication is hidden behind computation.
# - **Each half of a block.** The same bytes travel in three times as many messages. Each has the
#   latency of page [02](02_flatten.md), which is 0.13 ms for a ring of 32 GPUs, and computing with
#   half a block does not take long enough to hide it. (For short messages libraries have ways with
#   fewer steps; see page [22](22_hybrid.md).) The memory is hardly less than with blocks, because a
#   block is already small beside everything else.
#
# So a unit should take longer to compute with than to gather, and it should be small beside the
# model. The block that a model repeats is usually both.
#
# ## What breaks without it
#
# Forget the policy. `FSDP(model)` is a valid call, and many first programs make it. Then the whole
# model is one unit. It is sharded between steps, but not while it is computed with. Here is a GPT
# of 7 billion parameters on 16 GPUs with 40 GB each:


# %%
def forgotten() -> None:
    for unit in ("block", "model"):
        try:
            report = run(
                unit, "--model gpt-7b --nodes 2 --gpu a100-40 --batch 1 --seq 512"
            ).report()
            print(f"{NAMES[unit]:16} {report['peak allocated'] / 1e9:.1f} GB at the peak")
        except torch.OutOfMemoryError as error:
            print(f"{NAMES[unit]:16} {type(error).__name__}")


@on_ranks(2)
def a_warning() -> None:
    model = FSDP(GPT(layers=4, width=128))
    if dist.get_rank() == 0:
        explain(model)


# %% [markdown]
# With blocks a quarter of the memory is used. Without the policy it is not enough, although each
# GPU stores only a sixteenth of the model. `explain` warns of such a unit.
#
# ## Predict, then run
#
# 1. The whole model is one unit. How much does a rank send in a step, compared with DDP? (Page
#    [01](01_collectives.md): with blocks it is nearly one and a half times as much.)
# 2. A block is called at two places of a model, and blocks are units. How many units is it?
#
# <details><summary>Answers</summary>
#
# 1. As much as DDP: one gather and one reduce-scatter, the halves of an all-reduce. The root is not
#    gathered again for the backward, which begins right after the forward.
# 2. One. Units are made of modules, not of calls. It is gathered for each call.
#
# </details>


# %% [hidden]
@on_ranks(2)
def answers() -> None:
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model = FSDP(GPT(layers=4, width=128))
    model(tokens).sum().backward()
    assert model.engine.stats.all_gathers == model.engine.stats.reductions == 1  # 1. as much
    gpt = GPT(layers=1, width=128)
    gpt.blocks = nn.Sequential(gpt.blocks[0], nn.Tanh(), gpt.blocks[0])
    model = FSDP(gpt, auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert len(model.engine.units) == 2  # 2. one, and the root


# %% [hidden]
def main() -> None:
    blocks_are_units()
    three_sizes()
    draw()
    forgotten()
    a_warning()
    answers()


if __name__ == "__main__":
    main()

"""Strategies: python tutorials/16_groups.py; the page is 16_groups.md."""

# %% [markdown]
# # Strategies: what to shard, and what to keep
#
# A GPT of 1.3 billion parameters is trained with Adam. It computes in bf16, but what stays in
# memory between steps is in fp32 (page [14](14_precision.md)). That takes 16 bytes for each
# parameter: 4 for its value, 4 for its gradient, and 8 for the two averages that Adam keeps. For
# this model that is 21 GB, and the GPU has 40. So the model fits without sharding, and DDP would
# do. FSDP leaves most of the 40 GB to activations, but it sends half as much again as DDP (page
# [01](01_collectives.md)). Is there something in between?
#
# PyTorch calls the answer a *sharding strategy*. There are three for a single group of ranks:
#
# - **`FULL_SHARD`** is what all pages have done so far. Parameters are gathered for the forward,
#   freed after it, and gathered once more for the backward.
# - **`SHARD_GRAD_OP`** leaves out the second gather. What was gathered for the forward stays in
#   memory until the backward is done with it. So the whole model is in memory in the middle of a
#   training step.
# - **`NO_SHARD`** does what DDP does. Every rank has the whole model all the time, and the
#   gradients are all-reduced. (PyTorch 2.13 calls it deprecated, and refers to DDP.)
#
# Which of them is the fastest? Here the GPT is trained on four virtual machines with two GPUs each,
# with 4,096 tokens on each GPU. Between the machines the network moves 100 Gbit/s.

# %% [hidden]
import functools
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from train_gpt import GPT
from train_gpt import Block as DemoBlock

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.groups import Placement, place
from minifsdp.sim import cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.tape import Op
from minifsdp.sim.training.models import Block, next_token
from minifsdp.sim.training.presets import MODELS

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _ = ShardingStrategy
THREE = (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)
torch.set_num_threads(1)


# %%
MACHINES = {"gpu": "a100-40", "nodes": 4, "gpus_per_node": 2, "network": 100e9 / 8}
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def train(strategy: ShardingStrategy, steps: int = 1, **machines: Any) -> dict[str, Any]:
    with cluster(**machines) as gpu:
        module, policy = MODELS["gpt-1.3b"].build(), ModuleWrapPolicy({Block})
        settings = {"auto_wrap_policy": policy, "mixed_precision": BF16}
        model = FSDP(module, sharding_strategy=strategy, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(steps):
            optimizer.zero_grad()
            next_token(model, batch=2, length=2048).backward()
            with torch.device("cpu"):  # where Adam counts its steps
                optimizer.step()
            gpu.step()
    shards = list(model.parameters())
    sent = [op.label for op in gpu.tape if isinstance(op, Op) and op.sent]
    kept = {
        "parameters": sum(s.nbytes for s in shards),
        "gradients": sum(s.grad.nbytes for s in shards),
        "optimizer state": sum(2 * optimizer.state[s]["exp_avg"].nbytes for s in shards),
        "parameters in bf16, at most": model.engine.stats.peak_unsharded_bytes,
    }
    return {**gpu.report(), "kept": kept, "gathers": sum("gather" in of for of in sent) / steps}


def compare() -> None:
    for name, run in three_runs().items():
        peak, sent = run["peak allocated"] / 1e9, run["bytes sent"] / 1e9
        print(f"{name:>13}: {peak:4.1f} GB at the peak, {sent:4.1f} GB sent, {run['step']:.2f} s")


# %% [hidden]
@functools.cache
def three_runs() -> dict[str, dict[str, Any]]:
    return {strategy.name: train(strategy, 2, **MACHINES) for strategy in THREE}


def draw() -> None:
    kept = {name: run["kept"] for name, run in three_runs().items()}
    title = "memory of each of 8 GPUs, without activations"
    bars(Path(__file__).with_suffix(".svg"), title, kept, lambda size: f"{size / 1e9:.1f} GB")
    full, half, none = three_runs().values()
    sums = [round(sum(row.values()) / 1e9, 1) for row in kept.values()]
    assert sums == [3.0, 5.3, 23.9], sums  # as the picture's text says
    gathered = [round(row["parameters in bf16, at most"] / 1e9, 1) for row in kept.values()]
    assert gathered == [0.3, 2.7, 2.7], gathered
    assert round(kept["NO_SHARD"]["parameters"] / 4e9, 1) == 1.3 and GPUS["a100-40"].memory < 43e9
    assert round(100 * full["bytes sent"] / half["bytes sent"]) == 100 + 45
    assert (round(full["step"], 2), round(full["compute"], 2)) == (0.70, 0.25)
    fp32 = sum(kept["NO_SHARD"].values()) - kept["NO_SHARD"]["parameters in bf16, at most"]
    assert round(fp32 / 1e9) == 21 and 2 * 2048 == 4096  # GB; tokens
    assert half["bytes sent"] == none["bytes sent"] and half["step"] < none["step"] < full["step"]


# %% [markdown]
# ![Three bars of memory. FULL_SHARD 3.0 GB, of which 0.3 are gathered. SHARD_GRAD_OP 5.3 GB, of
# which 2.7 are gathered. NO_SHARD 23.9 GB: parameters, as much of gradients, twice as much of
# optimizer state, and 2.7 GB of parameters in bf16.](16_groups.svg)
#
# The two upper bars differ in the orange part only, which is what was gathered and is not freed
# yet. With `FULL_SHARD` that is at most the root and one block, with `SHARD_GRAD_OP` all units.
# `NO_SHARD` gathers nothing, but it has to cast all parameters to bf16 to compute with them. (The
# printed peaks are higher than the bars: there are activations, too, and tensors that Adam needs
# during its step.)
#
# `SHARD_GRAD_OP` sends exactly as much as DDP. It is also faster than DDP here, for two reasons.
# Half of its communication is in the forward, where DDP has nothing to send, and each rank steps
# only an eighth of the parameters. `FULL_SHARD` sends 45 % more and is the slowest, because this
# network is slow: the GPU computes for 0.25 s, and waits for the rest of the 0.70 s. So if the
# orange part fits into memory and the network is slow, take `SHARD_GRAD_OP`.
#
# (You may know these as the [stages of
# ZeRO](https://deepspeed.readthedocs.io/en/stable/zero3.html). Stage 1 shards the optimizer state,
# stage 2 also the gradients, stage 3 also the parameters. `FULL_SHARD` is stage 3. `SHARD_GRAD_OP`
# is often called stage 2, but between steps a rank has only its shard of the parameters, as in
# stage 3.)
#
# ## Two groups and one bit
#
# A *process group* is a list of ranks that take part in a collective. So far it was always all of
# them. In general the ranks stand in a grid of rows and columns. The ranks of a row *shard*: each
# has a different shard of the same parameters. The ranks of a column *replicate*: all of them have
# the same. So a strategy is no more than two groups, and one bit which says whether parameters are
# freed after the forward. The engine knows nothing else of it:
#
# {{ minifsdp/comm/groups.py Placement }}
#
# On the four machines with two GPUs each, rank 0 is in these groups:


# %%
def grid() -> None:
    with cluster(**MACHINES):
        for strategy in (*THREE, HYBRID_SHARD):
            *groups, bit = place(strategy, None, None)
            row, column = (g and dist.get_process_group_ranks(g) for g in groups)
            print(f"{strategy.name:13}  row {row!s:24}  column {column!s:24}  frees: {bit}")


# %% [markdown]
# `FULL_SHARD` and `SHARD_GRAD_OP` have one row and differ in the bit. `NO_SHARD` has one column.
# The last line is a strategy that needs both groups: `HYBRID_SHARD` shards within a machine and
# replicates across machines. Page [22](22_hybrid.md) is about it. PyTorch calls a grid of ranks a
# *device mesh*; `init_device_mesh(kind, (rows, columns))` makes one, and below it is given to
# `FSDP`.
#
# ## What breaks: a row of one rank
#
# Somebody asks for `HYBRID_SHARD`, and there is one GPU in each machine. A row is a single rank
# then, so nothing is sharded. It seems reasonable to treat this as `NO_SHARD`, and to average
# gradients over the only group that is looked at, the row. In code it is three lines:


# %%
def shortcut(*arguments: Any) -> Placement:
    row, column, frees = place(*arguments)
    alone = row is not None and row.size() == 1
    return Placement(None, row, False) if alone else Placement(row, column, frees)


# %% [markdown]
# Two such machines train the GPT of `make demo` to name the next letter of the alphabet. Rank 0 has
# the small letters, and rank 1 has the capitals. After the training each rank asks its own model
# for both. What do you expect of the losses? (`next_letter`, which is the loss, is in [the
# program](16_groups.py).)


# %%
@on_ranks(2)
def one_gpu_a_machine() -> list[list[float]]:
    found, alphabets = [], torch.stack([torch.arange(97, 123), torch.arange(65, 91)])
    here = torch.get_default_device().type
    for name in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD with the shortcut"):
        torch.manual_seed(0)
        strategy, mesh = NO_SHARD, None
        if "HYBRID" in name:
            strategy, mesh = HYBRID_SHARD, init_device_mesh(here, (2, 1))  # two rows of one rank
        with patch("minifsdp.wrapping.settings.place", shortcut if "short" in name else place):
            model = FSDP(
                GPT(layers=4, width=128),
                auto_wrap_policy=ModuleWrapPolicy({DemoBlock}),
                sharding_strategy=strategy,
                device_mesh=mesh,
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        for _ in range(30):
            next_letter(model, alphabets[dist.get_rank()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses = [next_letter(model, alphabet).item() for alphabet in alphabets]
        print(f"{name:30}  loss of a to z {losses[0]:5.2f}, of A to Z {losses[1]:5.2f}")
        found.append(losses)
    return found


# %% [hidden]
def next_letter(model: nn.Module, alphabet: Tensor) -> Tensor:
    return cross_entropy(model(alphabet[None, :-1])[0], alphabet[1:])


def what_breaks() -> None:
    (none, hybrid, one), (_, _, other) = one_gpu_a_machine()
    assert none == hybrid and max(none) < 0.5
    assert one[0] < 0.5 < 5 < one[1] and other[1] < 0.5 < 5 < other[0]


# %% [markdown]
# `HYBRID_SHARD` gives exactly what `NO_SHARD` gives. With the shortcut gradients are averaged over
# a row of one rank, that is, not at all. Two models are trained, each on half of the data, and each
# rank reports a loss that looks *better* than the right one, because its own data is all that it
# learns. Nobody notices before the model is used: what is saved is the model of rank 0, and it has
# never seen a capital.
#
# PyTorch's first FSDP takes this shortcut. It warns that the world size is 1, by which it means the
# row, and the models drift apart
# ([pytorch#154888](https://github.com/pytorch/pytorch/issues/154888)). A library for reinforcement
# learning [found that out in production](https://github.com/verl-project/verl/issues/7493). In
# minifsdp a row of one rank is a row like any other.
#
# ## Predict, then run
#
# 1. How often is a block gathered in a step with each of the three strategies?
# 2. On 64 GPUs instead of 8, what becomes of the second bar, 5.3 GB?
# 3. All 8 GPUs are in one machine, where links between them are 24 times as fast as the network
#    above. How much longer does the step of `FULL_SHARD` take than that of `SHARD_GRAD_OP`?
#
# <details><summary>Answers</summary>
#
# 1. Twice with `FULL_SHARD`, once with `SHARD_GRAD_OP`, never with `NO_SHARD`.
# 2. It becomes 3.0 GB. The sharded parts are an eighth of what they were, 0.3 GB. The gathered
#    parameters are 2.7 GB on any number of GPUs.
# 3. About 1 %. The gathers are short, and the computation hides them.
#
# </details>


# %% [hidden]
def answers() -> None:
    gathers = [run["gathers"] for run in three_runs().values()]
    assert gathers == [2 * 24 + 1, 24 + 1, 0], gathers  # 1. twice, once, never; and the root once
    many = train(SHARD_GRAD_OP, nodes=64 // 8)["kept"]
    gathered = many.pop("parameters in bf16, at most")
    sharded = sum(many.values())
    assert (round(sharded / 1e9, 1), round(gathered / 1e9, 1)) == (0.3, 2.7)
    assert round((sharded + gathered) / 1e9, 1) == 3.0  # 2. that much
    assert GPUS["a100-40"].links == 24 * MACHINES["network"]
    full, half = (train(strategy, gpus_per_node=8)["step"] for strategy in THREE[:2])
    assert 1.005 * half < full < 1.015 * half  # 3. about 1 %


# %% [hidden]
def main() -> None:
    compare()
    draw()
    grid()
    what_breaks()
    answers()


if __name__ == "__main__":
    main()

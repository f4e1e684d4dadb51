"""Accumulating gradients: python tutorials/20_no_sync.py; the page is 20_no_sync.md."""

# %% [markdown]
# # Accumulating gradients: to reduce now or later
#
# You want an optimizer step after 8,192 tokens on each GPU, and only 2,048 fit into its memory. So
# you run four *micro-batches* of 2,048 tokens and step once. PyTorch makes that easy, because a
# backward *adds* to `.grad`. Divide each loss by four, call `backward()` four times, and then step.
# This is *gradient accumulation*.
#
# With several ranks there is a choice. The gradients can be averaged over the ranks after each
# micro-batch, or once, after the last. In DDP the second is done with a context, `no_sync()`,
# around the first three micro-batches. It saves three of four all-reduces and costs nothing. FSDP
# has `no_sync()`, too. What does it save there, and what does it cost?
#
# ## Two places to add up
#
# When the gradient of a unit is complete, each rank has all of it, computed from its own data. What
# a rank needs is its own shard of the mean over all ranks. This method starts to compute that, on a
# stream of its own (`value` is the gradient):
#
# {{ minifsdp/core/reduce.py ReduceScatter.launch -``value`` }}
#
# (`unit.comm` sends what the unit has to send: on a GPU by torch's own reduce-scatter, on a CPU by
# messages as on page [01](01_collectives.md).) At the end of the backward the result goes to where
# the optimizer looks:
#
# {{ minifsdp/core/reduce.py store_gradient -Add the result }}
#
# The last line is the first place to add up: `.grad` of the shard. What is added has been reduced
# already. The other place is before the reduction. Inside of `no_sync()` the gradient of a unit is
# not reduced. It stays on its rank, as large as the unit, and is added to. The first backward
# outside of `no_sync()` reduces the sum.
#
# Do both give the same? Here is the GPT of `make demo` on two ranks, with four micro-batches in
# each of five steps, against DDP with its `no_sync()`. (`tokens`, in [the program](20_no_sync.py),
# gives each rank different data.)

# %% [hidden]
import functools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from launch import on_ranks
from taken_out import stage, three_times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from train_gpt import CONTEXT, GPT
from train_gpt import Block as DemoBlock

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.collectives import reduce_scatter
from minifsdp.no_sync import AddUnreduced
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.training.models import Block, next_token
from minifsdp.sim.training.presets import MODELS
from minifsdp.sim.views.timeline import svg

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy
torch.set_num_threads(1)


def tokens(count: int) -> Iterator[Tensor]:
    sampler = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        yield torch.randint(256, (2, CONTEXT + 1), generator=sampler)


def demo(wrap: Any = FSDP) -> nn.Module:
    torch.manual_seed(0)
    policy = {"auto_wrap_policy": ModuleWrapPolicy({DemoBlock})} if wrap is FSDP else {}
    return wrap(GPT(layers=4, width=128), **policy)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


# %%
def train(model: nn.Module, waits: bool, steps: int = 5) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, rows in enumerate(tokens(4 * steps), 1):
        last = number % 4 == 0
        with model.no_sync() if waits and not last else nullcontext():
            (loss_of(model, rows) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def off_ddps(waits: bool) -> float:
    return (train(demo(FSDP), waits) - train(demo(DDP), waits=True)).abs().max().item()


@on_ranks(2)
def against_ddp() -> None:
    for waits in (True, False):
        off = off_ddps(waits)
        assert off == 0 if waits else 0 < off < 1e-6  # how much it is depends on the CPU
        print(f"no_sync: {waits!s:5}  largest difference to DDP:", "0" if waits else "below 1e-6")


# %% [markdown]
# With `no_sync()` the numbers are added in the same order as in DDP, and the parameters are equal
# in every bit. If each micro-batch is reduced at once, the same numbers are added in a different
# order, and the last bits are rounded differently.
#
# ## Taken out: the stage that adds
#
# Whether a backward reduces is decided by a layer, `NoSync` in
# [no_sync.py](../minifsdp/no_sync.py). In a backward inside of `no_sync()` it marks each unit, so
# that its gradient waits. When a later backward reduces, a *stage* adds what has waited:
# `AddUnreduced`, which the layer puts before the other stages of that reduction. Here it is taken
# out (by `three_times`, in [taken_out.py](taken_out.py)):


# %%
@on_ranks(2)
def without_the_stage() -> None:
    three_times(lambda: f"largest difference to DDP {off_ddps(True):.4f}", stage(AddUnreduced))


# %% [markdown]
# The gradients of the first three micro-batches wait, and nobody comes for them. No error says so,
# and the loss still falls: the model is trained with a quarter of its data, and a quarter of the
# learning rate.
#
# ## What it saves, and what it costs
#
# Here is the GPT of page [16](16_groups.md), with 1.3 billion parameters in bf16, on the same eight
# virtual GPUs with 100 Gbit/s between machines. It has four micro-batches of 2,048 tokens:


# %%
MACHINES = {"gpu": "a100-40", "nodes": 4, "gpus_per_node": 2, "network": 100e9 / 8}
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
SETTINGS = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "mixed_precision": BF16}


@functools.cache
def virtual(strategy: ShardingStrategy, waits: bool, batches: int = 4) -> VirtualGpu:
    with cluster(**MACHINES) as gpu:
        model = FSDP(MODELS["gpt-1.3b"].build(), sharding_strategy=strategy, **SETTINGS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the second step is measured
            for number in range(1, batches + 1):
                with model.no_sync() if waits and number < batches else nullcontext():
                    (next_token(model, batch=1, length=2048) / batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
    return gpu


def what_it_saves() -> None:
    for strategy in (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD):
        for waits in (False, True):
            report = virtual(strategy, waits).report()
            print(f"{strategy.name:13}  {'no_sync' if waits else 'at once'}  "
                  f"{report['bytes sent'] / 1e9:4.1f} GB sent, {report['step']:.2f} s, "
                  f"peak {report['peak allocated'] / 1e9:4.1f} GB")  # fmt: skip


# %% [hidden]
def draw() -> None:
    names = {"FULL_SHARD, reduced at once": False, "FULL_SHARD with no_sync": True}
    picture = svg({name: virtual(FULL_SHARD, w).tape for name, w in names.items()})
    Path(__file__).with_suffix(".svg").write_text(picture)
    sent = {(s, w): virtual(s, w).report()["bytes sent"]
            for s in (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD) for w in (False, True)}  # fmt: skip
    with torch.device("meta"):
        size = sum(p.numel() * 2 for p in MODELS["gpt-1.3b"].build().parameters())
    assert (round(size / 1e9, 1), round(size / 2**30, 1)) == (2.7, 2.5)
    assert round(size * 7 / 8 / 1e9, 1) == 2.3
    assert round(sent[FULL_SHARD, True] / sent[FULL_SHARD, False], 2) == 0.74
    steps = [virtual(FULL_SHARD, waits).report()["step"] for waits in (True, False)]
    peaks = [virtual(FULL_SHARD, w).report()["peak allocated"] / 2**30 for w in names.values()]
    assert round(steps[0] / steps[1], 2) == 0.75 and [round(p, 1) for p in peaks] == [5.7, 8.2]
    assert abs(peaks[1] - peaks[0] - size / 2**30) < 0.01  # one set of whole gradients
    assert sent[NO_SHARD, True] * 4 == sent[NO_SHARD, False] == sent[SHARD_GRAD_OP, False]
    assert sent[SHARD_GRAD_OP, True] == sent[NO_SHARD, True]


# %% [markdown]
# To gather the whole model, 2.7 GB in bf16, a rank sends seven eighths of it, 2.3 GB, and just as
# much to reduce its gradient. Count how often it does that in a step:
#
# - `NO_SHARD`, like DDP, all-reduces once for each micro-batch, which is two times 2.3 GB.
#   `no_sync` leaves one of four.
# - `SHARD_GRAD_OP` gathers and reduces once for each micro-batch. In `no_sync` it keeps what it has
#   gathered until the last, so one gather and one reduction are left.
# - `FULL_SHARD` gathers twice and reduces once for each micro-batch, 12 times in all (the root,
#   which stays, is gathered once). `no_sync` leaves out three reductions, so 9 are left. That saves
#   a quarter of the bytes and, on this slow network, a quarter of the time.
#
# And the memory grows, because a gradient that is not reduced is not cut either. Each rank has to
# keep its own gradient of *all* parameters, 2.7 GB.
#
# ![Two timelines of four forwards and backwards with the memory below. Above, the reduce lane is
# busy in each backward, and memory climbs in each forward and falls in each backward, with peaks of
# 5.7 GiB. Below, the reduce lane is empty until the fourth backward. Memory hardly falls in the
# first three backwards, and from the second micro-batch on its peaks are 8.2 GiB
# high.](20_no_sync.svg)
#
# Follow the dark green area of the lower timeline. In the first backward it hardly falls, because
# gradients take the place of the activations that are freed. 2.7 GB of them (2.5 GiB) are left at
# the end and wait. In the second backward and the third a second set takes the place of the
# activations, and at the end the area falls by that much. This second set is minifsdp's own: a
# backward that fails must not change anything, so its gradients are added to the waiting ones only
# when it has ended. (PyTorch's first FSDP adds at once and has one set.) The peaks are between a
# forward and its backward, when only one set is there.
#
# There is another price in bf16: the waiting gradients are added up in bf16, in which a small
# number that is added to a large one is lost (page [14](14_precision.md)). A reduction at once adds
# to the shard's gradient, which is in fp32.
#
# ## What breaks: a model that fitted
#
# Take a model that needs sharding. With 7 billion parameters on 4 GPUs of 40 GB, and two
# micro-batches of 2,048 tokens, it trains with `FULL_SHARD` and Adam. Somebody adds `no_sync()`, as
# it was in the DDP script:


# %%
def seven_billion(waits: bool) -> str:
    with torch.device("meta"):
        module = MODELS["gpt-7b"].build()
    with cluster("a100-40", gpus_per_node=4) as gpu:
        model = FSDP(module, **SETTINGS)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for step in (1, 2):
            try:
                with model.no_sync() if waits else nullcontext():
                    (next_token(model, batch=1, length=2048) / 2).backward()
                (next_token(model, batch=1, length=2048) / 2).backward()
            except torch.OutOfMemoryError:
                return f"out of memory in step {step}"
            with torch.device("cpu"):  # where Adam counts its steps
                optimizer.step()
            optimizer.zero_grad()
    return f"at most {gpu.report()['peak allocated'] / 1e9:.1f} GB"


def a_model_that_fitted() -> None:
    for waits in (False, True):
        print(f"no_sync: {waits!s:5}  {seven_billion(waits)}")


# %% [markdown]
# Whole gradients, 13 GB in bf16, are what FSDP was meant to avoid. Here they fit in the first step,
# when Adam has no averages yet, and in the second step they do not. Libraries have learned this:
# one has `no_sync` as a setting [that is off, since it can increase the peak
# memory](https://github.com/verl-project/verl/pull/7095). So with `FULL_SHARD` reduce each
# micro-batch at once, unless the GPU waits for reductions and there is memory to spare.
#
# The other mistake is to forget the backward outside, so that a step is made while gradients still
# wait. In DDP each rank then steps with its own gradients, and the models drift apart, without an
# error. Here it is refused:


# %%
@on_ranks(2)
def all_in_no_sync() -> None:
    model = demo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_of(model, *tokens(1)).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        if dist.get_rank() == 0:
            print(error)


# %% [markdown]
# ## Predict, then run
#
# 1. `ReduceScatter` multiplies what a rank brings by `1 / unit.shard_world_size`, *before* the sum.
#    In fp16 the largest number is 65,504. On each of two ranks a gradient is 40,000. What is the
#    mean, if one adds first and divides afterwards?
# 2. With two micro-batches instead of four, of which one is in `no_sync()`, what becomes of the
#    peak of `FULL_SHARD`?
#
# <details><summary>Answers</summary>
#
# 1. Infinite: the sum does not fit into fp16, and half of infinity is infinity. If each is divided
#    first, the mean is 40,000.
# 2. It stays at 8.8 GB. The peak is between a forward and its backward. All activations are there
#    then, and one set of whole gradients, which the first micro-batch has left.
#
# </details>


# %% [hidden]
@on_ranks(2)
def mean_of_two(before: float, after: float) -> float:
    grad = torch.full((2,), 40_000.0, dtype=torch.float16)
    chunk, finish = reduce_scatter(grad, dist.group.WORLD, scale=before, tag=0)
    finish()
    return (chunk * after).item()


def answers() -> None:
    assert 4 * 2_048 == 8_192 and round(2 * 6.7) == 13 and torch.finfo(torch.float16).max == 65_504
    assert mean_of_two(1.0, 0.5)[0] == float("inf") and mean_of_two(0.5, 1.0)[0] == 40_000  # 1.
    peaks = [virtual(FULL_SHARD, True, n).report()["peak allocated"] for n in (4, 2)]
    peaks = [round(peak / 1e9, 1) for peak in peaks]
    assert peaks == [8.8, 8.8], peaks  # 2. it stays


# %% [hidden]
def main() -> None:
    against_ddp()
    without_the_stage()
    what_it_saves()
    draw()
    a_model_that_fitted()
    all_in_no_sync()
    answers()


if __name__ == "__main__":
    main()

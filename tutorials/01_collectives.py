"""Collectives: python tutorials/01_collectives.py; the page is 01_collectives.md."""

# %% [markdown]
# # All-reduce is reduce-scatter plus all-gather
#
# In each training step DDP calls `all_reduce`: each rank brings a gradient, and each gets the sum
# of all of them. That operation has two halves. FSDP calls the halves one by one, at different
# times of the step, and everything that it saves is saved in between. What do the ranks hold
# between the halves?
#
# ## Three collectives
#
# A *collective* is a function that all ranks have to call, and in which they exchange tensors. A
# rank that calls it early waits for the others. Here are three of them on two ranks, and each rank
# brings four numbers. The functions are [the engine's](../minifsdp/comm/collectives.py); the
# *engine* is minifsdp's code. Each starts its exchange and returns a function that waits until it
# is over; `reduce_scatter` returns its result as well, and `all_reduce` has one such function for
# each of its two halves. Of the arguments, `scale` is a factor for each addend, and `tag` a number
# that tells this exchange from others that are under way at the same time.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import strips
from launch import on_ranks

from minifsdp.comm.collectives import all_gather, all_reduce, reduce_scatter
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate

PICTURE = Path(__file__).with_suffix(".svg")


# %%
@on_ranks(2)
def two_halves() -> None:
    everybody = dist.group.WORLD
    mine = torch.arange(1.0, 5.0) * 10 ** dist.get_rank()
    print("brings                ", mine.tolist())

    half, finish = reduce_scatter(mine.clone(), everybody, scale=1.0, tag=0)
    finish()
    print("after a reduce-scatter", half.tolist())

    whole = torch.empty(4)
    all_gather(whole, half, everybody, tag=0)()
    print("then an all-gather    ", whole.tolist())

    for finish in all_reduce(mine, everybody, scale=1.0):
        finish()
    print("an all-reduce instead ", mine.tolist())


# %% [markdown]
# A *reduce-scatter* adds up and deals out: rank 0 gets the sums of the first half, and rank 1 those
# of the second. An *all-gather* puts the halves together, so that every rank has all of them. One
# after the other they are an *all-reduce*.
#
# With four ranks the pieces are quarters. In the picture rank 0 brings ones, rank 1 tens, and so
# on, so that the digits of a sum say who is in it. Follow one colour down:


# %% [hidden]
@on_ranks(4)
def pieces() -> list[dict[str, list[str]]]:
    rank, everybody = dist.get_rank(), dist.group.WORLD
    mine = torch.full((4,), 10.0**rank)
    chunk, finish = reduce_scatter(mine.clone(), everybody, scale=1.0, tag=0)
    finish()
    whole = torch.empty(4)
    all_gather(whole, chunk, everybody, tag=0)()
    middle = ["" if piece != rank else f"{int(chunk):04}" for piece in range(4)]
    return {
        "before": [f"{int(x):04}" for x in mine],
        "after the reduce-scatter": middle,
        "after the all-gather": [f"{int(x):04}" for x in whole],
    }


def draw() -> None:
    colours = ("blue", "purple", "green", "orange")
    ranks, rows = pieces(), []
    for moment in ranks[0]:
        rows.append((moment, []))
        for rank, found in enumerate(ranks):
            named = zip(found[moment], colours, strict=True)
            boxes = [(1.0, colour if words else "", words) for words, colour in named]
            rows.append((f"rank {rank}", boxes))
    strips(PICTURE, "a tensor of four pieces, on four ranks", rows)


# %% [markdown]
# ![Three groups of four strips. Before: every rank has four coloured pieces of its own. After the
# reduce-scatter: rank 0 has only the first piece, rank 1 the second, and so on, each marked 1111.
# After the all-gather: every rank has all four, each marked 1111.](01_collectives.svg)
#
# Look at the state in the middle. No rank has more than a quarter of the tensor, and yet nothing is
# lost: together the ranks have every sum, once. A model can *stay* in that state between steps, and
# be put together only where it is needed. That is the idea of FSDP.
#
# ## What they cost
#
# Take a tensor of `n` bytes and `N` ranks. In a reduce-scatter a rank keeps one of its `N` pieces
# and sends the others. In an all-gather it sends its piece to each of the others (or passes on
# as many pieces, if they go round in a ring). Either way it sends `n (N - 1) / N` bytes, which is
# nearly `n` with many ranks. An all-reduce is twice that.
#
# DDP needs one all-reduce of the gradients in a step: two halves. FSDP, when it shards everything
# (its strategy `FULL_SHARD`), needs three: an all-gather of the parameters for the forward, another
# one for the backward, and a reduce-scatter of the gradients. So it sends one and a half times as
# much. Let us count, in a step of a GPT of 1.3 billion parameters in bfloat16, on 8 virtual GPUs:


# %%
def sent(strategy: str, precision: str = "bf16") -> float:
    words = f"--model gpt-1.3b --batch 1 --precision {precision} --strategy {strategy}"
    return simulate(parser().parse_args(words.split())).report()["bytes sent"]


def traffic() -> None:
    ddp, fsdp = sent("no_shard"), sent("full_shard")
    print(f"DDP's strategy, NO_SHARD: {ddp / 1e6:,.0f} MB sent by each rank in a step")
    print(f"FULL_SHARD:               {fsdp / 1e6:,.0f} MB, {fsdp / ddp:.2f} times as much")


# %% [markdown]
# The ratio is a little less than one and a half, because the embeddings and the head are gathered
# only once: their backward comes right after the forward has ended, so they are kept. In fp32 the
# same model sends twice the bytes.
#
# ## What breaks without it
#
# Suppose you leave out the second half, and let each rank train with the sums that it has. Two
# ranks, four parameters, one step of gradient descent:


# %%
@on_ranks(2)
def half_a_reduction() -> list[float]:
    params, rank = torch.ones(4), dist.get_rank()
    grad = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (rank + 1)
    chunk, finish = reduce_scatter(grad, dist.group.WORLD, scale=0.5, tag=0)
    finish()
    params.chunk(2)[rank].sub_(0.1 * chunk)
    print([round(x, 2) for x in params.tolist()])
    return params.tolist()


# %% [markdown]
# The ranks have different models now, and there was no error. In each model one half is right and
# the other half is old. There are two ways to mend this. You could gather the *gradients* before
# the step: then you have an all-reduce, and DDP. Or you gather the *parameters*, just before they
# are used next, and until then throw away the half that is old. This is FSDP: the second half of
# the all-reduce has moved to the next step, and in between each rank holds a part only.
#
# ## Predict, then run
#
# 1. Three ranks, six numbers each. How many does a rank send in a reduce-scatter?
# 2. Rank 0 brings `[1, 2]`, rank 1 brings `[3, 4]`. What does rank 1 have after a reduce-scatter?
# 3. FSDP's strategy `SHARD_GRAD_OP` gathers the parameters for the forward and keeps them until the
#    backward is over. How much does it send in a step, compared with DDP?
#
# <details><summary>Answers</summary>
#
# 1. Four: it has three pieces of two numbers, keeps one piece and sends the other two.
# 2. `[6]`, the second of the two sums. Rank 0 has `[4]`.
# 3. Just as much: one all-gather and one reduce-scatter are the two halves of an all-reduce.
#
# </details>


# %% [hidden]
@on_ranks(2)
def small() -> list[float]:
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[dist.get_rank()]
    chunk, finish = reduce_scatter(mine, dist.group.WORLD, scale=1.0, tag=0)
    finish()
    return chunk.tolist()


def answers() -> None:
    assert sum(map(len, torch.empty(6).chunk(3)[1:])) == 4  # 1. two of its three pieces
    assert small() == [[4.0], [6.0]]  # 2. [6]: the second of the sums
    assert sent("shard_grad_op") == sent("no_shard")  # 3. as much as DDP
    assert sent("no_shard", "fp32") == 2 * sent("no_shard")


# %% [hidden]
def main() -> None:
    two_halves()
    draw()
    traffic()
    half_a_reduction()
    answers()


if __name__ == "__main__":
    main()

"""Collectives: python tutorials/01_collectives.py; the page is 01_collectives.md."""

# %% [markdown]
# # All-reduce is reduce-scatter plus all-gather
#
# In a step DDP has one thing to say: `all_reduce`. Each rank brings a gradient, and each leaves
# with the sum of all of them. FSDP's `FULL_SHARD` says the two halves of it instead, at two
# different times, and all that it saves, it saves in between. (Before the first step both can
# broadcast what rank 0 has. Where FSDP keeps copies, it all-reduces: page [22](22_hybrid.md).)
#
# ## Three conversations
#
# A *collective* is a function that every rank has to call. It is over when all of them have; who
# comes early waits. Here are two ranks, and each brings four numbers. (The decorator starts the
# processes and prints what they say, by rank. The functions are the engine's; each starts
# something and returns a function that waits for its end.)

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
# *Reduce-scatter* adds up, and deals out: rank 0 gets the sums of the first half, rank 1 of the
# second. *All-gather* puts halves together: everybody has everything. One after the other they
# are the all-reduce.
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
# The one thing to notice is the middle. Nobody has more than a quarter there, and yet nothing is
# lost: between them the ranks have every sum. A model could *live* in that state.
#
# ## What they cost
#
# In a reduce-scatter of `n` bytes a rank keeps one piece of `N` and sends the others; in an
# all-gather it sends one piece to each of the others. Either half is `n (N - 1) / N`, with many
# ranks nearly `n`, and an all-reduce is twice that. DDP needs one for each step. FULL_SHARD needs
# three halves: parameters are gathered for the forward, gathered once more for the backward, and
# gradients are reduced. That is one and a half times DDP's traffic, and it is the price of
# everything on the pages to come. Count it, in a step of a GPT of 1.3 billion parameters on 8 GPUs,
# in bfloat16 (minifsdp brings virtual GPUs along; they are on page [09](09_streams.md)):


# %%
def sent(strategy: str, precision: str = "bf16") -> float:
    words = f"--model gpt-1.3b --batch 1 --precision {precision} --strategy {strategy}"
    return simulate(parser().parse_args(words.split())).report()["bytes sent"]


def price() -> None:
    ddp, fsdp = sent("no_shard"), sent("full_shard")
    print(f"DDP's strategy, NO_SHARD: {ddp / 1e6:,.0f} MB sent by each rank in a step")
    print(f"FULL_SHARD:               {fsdp / 1e6:,.0f} MB, {fsdp / ddp:.2f} times as much")


# %% [markdown]
# (Not 1.50, because the outermost layers are not gathered twice: their backward follows at once. In
# fp32, as on page [16](16_groups.md), the same model sends twice the bytes.)
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
# The ranks have different models now, and nothing has complained. Each has one half that is right
# and one that is old. You could mend it by gathering the *gradients*, and have DDP again. Or gather
# the *parameters*, later, just before they are used, and until then throw away the half that is
# old. The second is FSDP.
#
# ## Predict, then run
#
# 1. Three ranks, six numbers each. How many does a rank send in a reduce-scatter?
# 2. Rank 0 brings `[1, 2]`, rank 1 brings `[3, 4]`. What has rank 1 after a reduce-scatter?
# 3. `SHARD_GRAD_OP` keeps the parameters from the forward to the backward. What does it send?


# %%
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
    price()
    half_a_reduction()
    answers()


if __name__ == "__main__":
    main()

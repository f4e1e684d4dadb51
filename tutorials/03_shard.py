"""Shard: python tutorials/03_shard.py; the page is 03_shard.md."""

# %% [markdown]
# # Shard: a cut that does not look where it cuts
#
# Adam keeps two averages for each parameter. In fp32, with 1.3 billion parameters, they take 10.6
# GB, and with DDP each GPU has the same ones. It would be enough if each number were updated on
# *one* GPU. But on which? You could deal out layers, but such a GPT has 24 of them for 16 GPUs, and
# an embedding as large as two. FSDP takes the flat tensor of page [02](02_flatten.md) and cuts it
# into pieces of equal length, *chunks*, one for each rank.
#
# {{ minifsdp/shard.py unpadded_shard_numel }}
#
# {{ minifsdp/shard.py shard }}
#
# Five numbers, four ranks:

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import strips
from launch import on_ranks
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.shard import shard, unpadded_shard_numel

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def five_on_four() -> None:
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    for rank in range(4):
        real = unpadded_shard_numel(5, rank, 4)
        print(f"rank {rank}: {shard(flat, rank, 4).tolist()}, {real} real")


# %% [markdown]
# In an all-gather every rank has to bring the same amount. So the end is *padded* with zeros, here
# with three, and the last rank has nothing else. It takes part in each collective all the same.
#
# Now two small layers on three ranks. What shares a flat tensor is a *unit*; here both are one.
# `model.parameters()` gives the optimizer this rank's chunk, up to where the data end:


# %%
@on_ranks(3)
def two_layers() -> tuple[dict[str, int], int]:
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)))
    unit, (param,) = model.engine.root, model.parameters()
    print(f"{type(param).__name__}, {param.numel()} numbers; padded {unit.padded_shard.numel()}")
    return {info.name: info.shape.numel() for info in unit.param_infos}, unit.padded_shard.numel()


# %% [hidden]
def draw() -> None:
    ranks, colours = two_layers(), ("blue", "purple", "green", "orange", "red")
    sizes, chunk = ranks[0]
    names = [*sizes, "padding"]
    sizes["padding"] = chunk * len(ranks) - sum(sizes.values())
    boxes = [(sizes[name], colour, name) for name, colour in zip(names, colours, strict=True)]
    numbers = [i for i, name in enumerate(names) for _ in range(sizes[name])]
    rows = [("parameters", []), ("flat tensor", boxes), ("chunks", [])]
    for rank in range(len(ranks)):
        mine = numbers[rank * chunk : (rank + 1) * chunk]
        parts = {i: mine.count(i) for i in mine}
        pieces = [(n, colours[i], f"{n} of {sizes[names[i]]}") for i, n in parts.items()]
        rows.append((f"rank {rank}", [(rank * chunk, "", ""), *pieces]))
    legend = dict(zip(colours, names, strict=True))
    strips(PICTURE, "22 numbers of two layers on three ranks", rows, legend)


# %% [markdown]
# ![A strip of 24 numbers in five colours, and below it one of 8 for each rank. The purple bias is
# on ranks 1 and 2. The last two numbers are red padding.](03_shard.svg)
#
# The one thing to notice: the cuts have nothing to do with the colours. Rank 1 has the end of the
# first weight and the beginning of its bias.
#
# ## Who does not mind
#
# To an optimizer a rank has no layers any more, only numbers. That is enough for Adam, whose step
# for a number depends on that number, its gradient and its two averages, and on no other number:


# %%
def adam_on_chunks() -> None:
    whole = nn.Parameter(torch.linspace(-1, 1, 22))
    chunks = [nn.Parameter(shard(whole.detach(), rank, 3)) for rank in range(3)]
    optimizer = torch.optim.AdamW([whole, *chunks], lr=0.1)
    for step in range(1, 4):
        whole.grad = torch.linspace(-2, 1, 22) ** step
        for rank, chunk in enumerate(chunks):
            chunk.grad = shard(whole.grad, rank, 3)
        optimizer.step()
    print("equal in every bit:", torch.equal(torch.cat([*chunks])[:22], whole))


@on_ranks(4)
def optimizer_memory() -> None:
    for ranks in (1, 2, 4):
        group, _ = dist.new_subgroups(ranks)  # this rank's group, of so many
        model = FSDP(nn.Linear(100, 100), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(100)).sum().backward()
        optimizer.step()
        (state,) = optimizer.state.values()
        if dist.get_rank() == 0:
            print(f"{ranks} in the group: {sum(t.nbytes for t in state.values()):,} bytes of state")


# %% [markdown]
# Half for two ranks, a quarter for four. (The 4 bytes beyond 80,800 count the steps.) Parameters
# and their gradients are cut alike, so between steps, of the sixteen bytes for each parameter, a
# rank keeps `16 / N`. The optimizer has less to do, too.
#
# ## What breaks without it
#
# An optimizer that wants all its steps to be of the same length divides the gradient by its norm,
# for which it needs all of it. Here the gradient of a weight is `[3, 4, 6, 8]`. With `NO_SHARD`,
# which is DDP's strategy, every rank has the whole.


# %%
@on_ranks(2)
def normalized() -> None:
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        model = FSDP(nn.Linear(4, 1, bias=False), sharding_strategy=strategy)
        x = torch.tensor([3.0, 4.0, 6.0, 8.0]) + (2 * dist.get_rank() - 1)  # one less, one more
        model(x).sum().backward()
        (param,) = model.parameters()
        step = param.grad / param.grad.norm()
        print(f"{strategy.name:10} {param.grad.tolist()} -> {[round(x, 2) for x in step.tolist()]}")


# %% [markdown]
# The last number should move 2.7 times as far as the first, and moves 1.3 times as far. Nothing has
# complained, and with four ranks the result would be a third one. So it is with whatever looks at
# more than one number: clipping by norm; LARS, which wants the norm of each weight; Muon, which
# wants the matrix. Sums of squares can be added up over ranks, as clipping does on page
# [20](20_no_sync.md). (minifsdp refuses torch's own, which does not.) A matrix must be gathered.
#
# It is also why padding is kept from the optimizer. If rank 2 of the picture had eight numbers
# instead of six, the mean of them would be a quarter too small.
#
# ## Predict, then run
#
# 1. Nine numbers on eight ranks. How many ranks have nothing?
# 2. Such a rank takes the norm of its gradient. And the mean?
# 3. `clip_grad_norm_` is wrong on chunks. What about `clip_grad_value_`?


# %%
def answers() -> None:
    assert [unpadded_shard_numel(9, rank, 8) for rank in range(8)].count(0) == 3  # 1.
    assert torch.empty(0).norm() == 0 and torch.empty(0).mean().isnan()  # 2. 0, and no number
    parts = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parts[0].grad, parts[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    nn.utils.clip_grad_value_(parts, 5.0)
    assert torch.cat([part.grad for part in parts]).tolist() == [3, 4, 5, 5]  # 3. it is fine


# %% [hidden]
def main() -> None:
    five_on_four()
    draw()
    adam_on_chunks()
    optimizer_memory()
    normalized()
    answers()


if __name__ == "__main__":
    main()

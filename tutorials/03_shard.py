"""Shard: python tutorials/03_shard.py; the page is 03_shard.md."""

# %% [markdown]
# # Shard: a cut that does not look where it cuts
#
# Adam keeps two averages for each parameter. For 1.3 billion parameters in fp32 they take 10.6 GB,
# and with DDP each GPU has the same ones. It would be enough if each number were updated on *one*
# GPU. But on which? You could deal out layers. But such a GPT has 24 blocks, which 16 GPUs cannot
# share evenly, and an embedding that is as large as two blocks.
#
# FSDP does not look at layers. It takes the flat tensor of page [02](02_flatten.md), cuts it into
# pieces of equal length, and gives each rank one of them. To *shard* a tensor is to keep only a
# piece of it on each rank, and such a piece is called a *shard*, or a *chunk* of the flat tensor.
#
# {{ minifsdp/core/shard.py padded_shard_numel }}
#
# {{ minifsdp/core/shard.py unpadded_shard_numel }}
#
# {{ minifsdp/core/shard.py shard }}
#
# Five numbers do not divide by four ranks. What does each rank get?

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
from train_gpt import GPT

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy
from minifsdp.core.shard import shard, unpadded_shard_numel
from minifsdp.sim.training.presets import find

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def five_on_four() -> None:
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    for rank in range(4):
        real = unpadded_shard_numel(5, rank, 4)
        print(f"rank {rank}: {shard(flat, rank, 4).tolist()}, {real} real")


# %% [markdown]
# On GPUs all ranks have to bring equally many elements to an all-gather. So the end is filled with
# zeros, here with three: this is *padding*. The last rank has nothing else. It takes part in each
# collective all the same, because the others wait for it.
#
# Now two small layers on three ranks. Modules whose parameters share a flat tensor are a *unit*.
# Here both layers are one unit. `model.parameters()` gives the optimizer this rank's chunk, without
# the padding:


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
# The cuts have nothing to do with the colours. Rank 1 has the end of the first weight, and the
# beginning of its bias.
#
# ## Who does not mind
#
# The optimizer of a rank sees no layers any more, only numbers. That is enough for Adam: its step
# for a number depends on that number, its gradient and its two averages, and on nothing else. So
# three optimizers with a chunk each do what one does with the whole:


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
        model = FSDP(GPT(layers=4, width=128), process_group=group)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
        optimizer.step()
        (state,) = optimizer.state.values()
        if dist.get_rank() == 0:
            print(f"{ranks} in the group: {sum(t.nbytes for t in state.values()):,} bytes of state")


# %% [markdown]
# With two ranks each has a half, with four a quarter. (Of the bytes, 4 count the steps; they are
# not sharded.) Parameters and gradients are sharded in the same way. So between steps a rank keeps
# `16 / N` bytes for each parameter, and its optimizer has less to compute, too.
#
# ## What breaks without it
#
# The cut is harmless as long as nobody looks at more than one number at a time. Take an optimizer
# that wants all steps to be equally long. It divides the gradient by its norm, and the norm depends
# on all numbers. The gradient of the weight here is `[3, 4, 6, 8]`. With the strategy `NO_SHARD`
# every rank has all of it, as in DDP. What does each rank divide by under `FULL_SHARD`?


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
# Each rank divides by the norm of its own chunk. The last number should move 2.7 times as far as
# the first, and moves 1.3 times as far. Training goes on in a different direction, and with four
# ranks it would be a third one. PyTorch's FSDP1 does this without a word
# ([seen with torch 2.13](../tests/test_lessons.py)); the gradients of its FSDP2 have the norm of
# the whole (page [25](25_fsdp2.md)). minifsdp warns when such a norm is taken, and still computes
# it.
#
# The same holds for everything that looks at more than one number: clipping by norm;
# [LARS](https://arxiv.org/abs/1708.03888), which wants the norm of each weight;
# [Muon](https://kellerjordan.github.io/posts/muon/), which wants each matrix. Sums of squares can
# be added up over ranks, which is how clipping works on page [21](21_clip_grad.md). A matrix has to
# be gathered.
#
# This is also why the optimizer does not get the padding. If rank 2 of the picture had eight
# numbers instead of six, with two zeros, their mean would be a quarter too small.
#
# ## Predict, then run
#
# 1. Nine numbers are sharded over eight ranks. How many ranks have nothing but padding?
# 2. Such a rank takes the norm of its gradient without the padding. What is it? And the mean?
# 3. `clip_grad_norm_`, which scales all gradients by one factor, is wrong on chunks. What about
#    `clip_grad_value_`, which limits each number?
#
# <details><summary>Answers</summary>
#
# 1. Three. Each chunk has two numbers, so four ranks have two each, the fifth has one, and nothing
#    is left for the others.
# 2. The norm of no numbers is 0. The mean is 0 divided by 0, which is not a number: a `nan`, and it
#    spreads to whatever it is added to.
# 3. It is right, because it looks at one number at a time.
#
# </details>


# %% [hidden]
def a_large_gpt() -> None:
    job = find("gpt-1.3b", None, None)
    with torch.device("meta"):
        model = job.build()
    blocks = [part for part in model.modules() if isinstance(part, job.blocks)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, blocks[0], model.tokens)]
    assert len(blocks) == 24 and 24 % 16 and round(sizes[2] / sizes[1], 1) == 2.0
    assert round(8 * sizes[0] / 1e9, 1) == 10.6 and round(sizes[0] / 1e9, 1) == 1.3


def answers() -> None:
    assert (round(8 / 3, 1), round((8 / 10) / (3 / 5), 1)) == (2.7, 1.3)  # the steps above
    assert [unpadded_shard_numel(9, rank, 8) for rank in range(8)] == [2] * 4 + [1] + [0] * 3  # 1.
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
    a_large_gpt()
    answers()


if __name__ == "__main__":
    main()

"""Clipping: python tutorials/21_clip_grad.py; the page is 21_clip_grad.md."""

# %% [markdown]
# # Clipping: the norm of a gradient in pieces
#
# Now and then a batch gives a gradient that is many times as large as usual, and one step with it
# can ruin the parameters. So most training programs *clip*: all gradients together are one long
# vector, and if its *norm*, the square root of the sum of all squares, is larger than `max_norm`,
# the vector is multiplied by `max_norm / norm`. It keeps its direction and gets the norm
# `max_norm`.
#
# In plain PyTorch this is a call before the step, `torch.nn.utils.clip_grad_norm_(parameters,
# 1.0)`. With FSDP a rank has only its shards of the gradients. Can it clip with those?
#
# ## Norms do not add up, squares do
#
# Take a layer of four weights on two ranks, whose averaged gradient is `[3, 4, 0, 12]`. Its norm is
# 13. Rank 0 has the shard `[3, 4]` with the norm 5, and rank 1 has `[0, 12]` with the norm 12. No
# rank knows the 13, and 5 and 12 do not add up to it. But the squares do: 25 and 144 are 169, which
# is the square of 13. So each rank adds up its squares, and one all-reduce of a single number is
# enough. `model.clip_grad_norm_()` does that:
#
# {{ minifsdp/between_steps/clip_grad.py clip_grad_norm -Scale all -if not norm_type > 0
# -count_cleared -for unit in units: -largest = -A unit without -units_with_params = -dtypes =
# -dtype = -groups = -ranks = -grads = -for grad in grads -if largest: }}
#
# (`norm_type` is 2 and `largest` is False, unless the user wants another norm. `add_up` is the
# all-reduce. `counts` is about replicas: of several ranks that have the same shard, only one
# counts.)

# %% [hidden]
import math
import textwrap
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from taken_out import call, three_times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from train_gpt import CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy

PICTURE = Path(__file__).with_suffix(".svg")
torch.set_num_threads(1)


def demo(wrap: Any = FSDP) -> nn.Module:
    torch.manual_seed(0)
    policy = {"auto_wrap_policy": ModuleWrapPolicy({Block})} if wrap is FSDP else {}
    return wrap(GPT(layers=4, width=128), **policy)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    sampler = torch.Generator().manual_seed(seed)
    rows = torch.randint(256, (4, CONTEXT + 1), generator=sampler)
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


# %% [markdown]
# Is it right? Here are ten steps of the GPT of `make demo` on two ranks, each clipped to a norm of
# 0.1, against DDP with PyTorch's function. (`loss_of` takes different data on each rank. It is in
# [the program](21_clip_grad.py).)


# %%
@on_ranks(2)
def against_ddp() -> None:
    trained, norms = {}, {}
    for wrap in (DDP, FSDP):
        model = demo(wrap)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(10):
            loss_of(model, seed=2 * step + dist.get_rank()).backward()
            if wrap is DDP:
                norm = clip_grad_norm_(model.parameters(), max_norm=0.1)
            else:
                norm = model.clip_grad_norm_(max_norm=0.1)
            norms.setdefault(wrap, norm.item())  # of the first step, before clipping
            optimizer.step()
            optimizer.zero_grad()
        trained[wrap] = torch.cat([value.flatten() for value in model.state_dict().values()])
    off = (trained[DDP] - trained[FSDP]).abs().max().item()
    assert 0 < off < 1e-6  # how much it is depends on the CPU
    print(f"norm {norms[DDP]:.4f} and {norms[FSDP]:.4f}; after ten steps off by less than 1e-6")


# %% [markdown]
# The norms are the same but for rounding, since the squares are added in a different order. (What
# `clip_grad_norm_` returns is the norm before clipping, which is worth logging.)
#
# ## Taken out: the sum over the ranks
#
# Clipping is not a layer, because it does nothing during a forward or a backward. It is a function
# that is called after them, [clip_grad.py](../minifsdp/between_steps/clip_grad.py). It has one call
# that PyTorch's function does not have, `add_up`. Take it out, and put it back (by `three_times`,
# in [taken_out.py](taken_out.py)):


# %%
@on_ranks(2)
def without_the_sum() -> None:
    def program() -> str:
        model = demo()
        loss_of(model, seed=dist.get_rank()).backward()
        return f"the norm is {model.clip_grad_norm_(max_norm=0.1).item():.4f}"

    three_times(program, call("minifsdp.between_steps.clip_grad.add_up"))


# %% [markdown]
# Without the call it is the norm of rank 0's shards, and nothing looks wrong with it.
#
# ## What breaks: each rank clips by its own norm
#
# A program that was written for DDP calls PyTorch's function, with `model.parameters()`, which are
# the shards now. For that function they are ordinary tensors. Each rank would find a different norm
# and scale by it. In minifsdp a shard looks at which function reads its gradient, and refuses this
# one:


# %%
@on_ranks(2)
def refused() -> None:
    model = demo()
    loss_of(model, seed=dist.get_rank()).backward()
    try:
        clip_grad_norm_(model.parameters(), max_norm=0.1)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            print(textwrap.fill(str(error), 90))


# %% [markdown]
# Without that, this would happen to the gradient `[3, 4, 0, 12]`, clipped to the norm 1:


# %%
@on_ranks(2)
def clip(whose: str, mean: list[float]) -> list[float]:
    model = FSDP(nn.Linear(4, 1, bias=False))
    model(torch.tensor([mean]) * (0.5 + dist.get_rank())).sum().backward()  # dy/dw = x
    (param,) = model.parameters()
    if whose == "each rank's":
        param.is_sharded = False  # so that it looks like an ordinary tensor
        clip_grad_norm_([param], max_norm=1.0)
    else:
        model.clip_grad_norm_(max_norm=1.0)
    return [round(x, 2) for x in param.grad.tolist()]


def by_whose_norm() -> None:
    for whose in ("the model's", "each rank's"):
        first, second = clip(whose, [3.0, 4.0, 0.0, 12.0])
        found = first + second
        print(f"by {whose:11} norm: {found}, of norm {math.hypot(*found):.2f}")


# %% [markdown]
# The second line points in a different direction: the first two weights count as much as the last
# two. And it is longer than 1. Each shard has been clipped to 1, so two of them have a norm of
# 1.41, the square root of 2. With more ranks it gets worse. Here is one gradient of the GPT,
# clipped to 0.1 by the norms of the shards of 2 to 512 ranks. (`clipped_apart`, in the program,
# cuts the units as FSDP does.)


# %% [hidden]
def clipped_apart(ranks: int, max_norm: float) -> tuple[float, float]:
    """The norm before clipping and after it, if each rank clips its own shards."""
    model = demo(lambda gpt: gpt)
    loss_of(model, seed=0).backward()
    blocks = {id(param) for param in model.blocks.parameters()}
    modules = [list(block.parameters()) for block in model.blocks]
    modules.append([param for param in model.parameters() if id(param) not in blocks])
    units = [torch.cat([param.grad.flatten() for param in params]) for params in modules]
    shards = [pad(unit, (0, -len(unit) % ranks)).view(ranks, -1) for unit in units]
    norms = torch.stack([shard.norm(dim=1) for shard in shards]).norm(dim=0)  # of each rank
    after = norms * (max_norm / (norms + 1e-6)).clamp(max=1)
    return norms.norm().item(), after.norm().item()


def draw() -> None:
    before, right = clipped_apart(1, 0.1)
    rows = {"not clipped": before, "by the model's norm": right}
    rows |= {f"by each rank's, {n} ranks": clipped_apart(n, 0.1)[1] for n in (2, 8, 64, 512)}
    title = "norm of the gradient of the GPT, clipped to 0.1"
    bars(PICTURE, title, {name: {"": norm} for name, norm in rows.items()}, "{:.2f}".format)
    assert [round(norm, 2) for norm in rows.values()] == [1.32, 0.1, 0.14, 0.28, 0.74, 1.25]


# %% [markdown]
# ![Six bars of a norm. Not clipped 1.32. By the model's norm 0.10. By each rank's norm 0.14 with 2
# ranks, 0.28 with 8, 0.74 with 64, and 1.25 with 512.](21_clip_grad.svg)
#
# The more ranks there are, the smaller is each rank's part of the norm, and the less there is to
# clip. With 512 ranks hardly anything is clipped. There is no error, and no two ranks differ in a
# parameter, since each shard is scaled by one rank. But the same program clips with 2 GPUs and does
# not with 512, and the spike that it was meant to stop comes through.
#
# When PyTorch's first FSDP was new, it had no function of its own, and [an issue says what goes
# wrong](https://github.com/pytorch/pytorch/issues/72548). It has one since. PyTorch's function is
# still called on shards: [here is a training program that was
# mended](https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6). With FSDP2 PyTorch's function is
# the right one (page [26](26_rows.md)).
#
# ## Predict, then run
#
# 1. Every rank's shard has a norm below `max_norm`. Can there be anything to clip?
# 2. With `NO_SHARD` all ranks have the same gradient. Suppose that on four ranks the squares are
#    added up over all of them, without `counts`. Which norm comes out?
#
# <details><summary>Answers</summary>
#
# 1. Yes. Two shards with a norm of 0.8 are a gradient with a norm of 1.13.
# 2. Twice the right one: each square is counted 4 times, and the square root of 4 is 2. So
#    gradients are clipped that need not be. PyTorch's FSDP [had counted that
#    way](https://github.com/pytorch/pytorch/pull/88955).
#
# </details>


# %% [hidden]
@on_ranks(4)
def counted_by_all() -> float:
    norms = []
    for rank in (dist.get_rank(), 0):  # as it is, and as if each were the first of its group
        model = FSDP(nn.Linear(4, 1), sharding_strategy=ShardingStrategy.NO_SHARD)
        model(torch.ones(4)).sum().backward()
        with patch.object(dist.ProcessGroup, "rank", lambda group, rank=rank: rank):
            norms.append(model.clip_grad_norm_(max_norm=1.0).item())
    return norms[1] / norms[0]


def answers() -> None:
    assert math.hypot(5, 12) == 13 and 25 + 144 == 169 == 13**2
    clipped = clip("the model's", [0.8, 0.0, 0.0, 0.8])[0]
    assert round(math.hypot(0.8, 0.8), 2) == 1.13 and clipped == [0.71, 0.0]  # 1. yes
    assert all(abs(times - 2) < 1e-5 for times in counted_by_all())  # 2. twice


# %% [hidden]
def main() -> None:
    against_ddp()
    without_the_sum()
    refused()
    by_whose_norm()
    draw()
    answers()


if __name__ == "__main__":
    main()

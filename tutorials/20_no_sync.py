"""Gradients: python tutorials/20_no_sync.py; the page is 20_no_sync.md."""

# %% [markdown]
# # Gradients: adding up, waiting, clipping
#
# You want to step after 4,096 samples on each GPU, and 1,024 fit. So you run four *micro-batches*,
# and step once. With DDP you put the first three into `no_sync()`, to save communication, so you do
# with FSDP. It takes about twice the memory and is hardly faster. Then you clip: an error.
#
# ## Adding up over ranks
#
# When a unit's gradient is complete (page [05](05_hooks.md)), every rank has all of it, from its
# own data. What a rank needs is its chunk of their mean. It is reduced on a stream of its own:
#
# {{ minifsdp/reduce.py reduce_gradient }}
#
# (`shards is None` is NO_SHARD; `comm_hook` is a user's.) Look at `1 / shards.size()`. Each rank
# scales what it brings *before* it is added. Why not divide the sum? Two of 40,000, in fp16:

# %% [hidden]
import warnings
from contextlib import nullcontext
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from launch import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.collectives import reduce_scatter
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.views.timeline import svg

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy


# %%
@on_ranks(2)
def before_or_after() -> None:
    for before, after in ((1.0, 0.5), (0.5, 1.0)):
        grad = torch.full((2,), 40_000.0, dtype=torch.float16)
        chunk, finish = reduce_scatter(grad, dist.group.WORLD, scale=before, tag=0)
        finish()
        print(f"times {before} before the sum, {after} after it: {(chunk * after).item()}")


# %% [markdown]
# fp16 ends at 65,504. Only at a backward's end do results get to where the optimizer looks:
#
# {{ minifsdp/reduce.py store_gradient }}
#
# ## Twice before a step
#
# The last line is `.grad` adding up as always, but chunks. Instead a gradient may wait. Inside of
# `no_sync()` a backward leaves it on its rank, and the first backward outside reduces the sum. Both
# ways, on 8 virtual GPUs, with 8 layers of 64 MiB, each a unit:


# %%
def step(model: nn.Module, waits: bool, samples: int, width: int, batches: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for last in (False,) * (batches - 1) + (True,):
        with model.no_sync() if waits and not last else nullcontext():
            (model(torch.randn(samples, width)).pow(2).mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def virtual(strategy: ShardingStrategy, waits: bool, batches: int = 4) -> VirtualGpu:
    with cluster(nodes=2, gpus_per_node=4) as gpu:
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(model, sharding_strategy=strategy, auto_wrap_policy=policy)
        for _ in range(2):  # the second step is measured
            step(model, waits, samples=1024, width=4096, batches=batches)
            gpu.step()
    return gpu


def two_ways() -> None:
    for strategy in (NO_SHARD, FULL_SHARD):
        gpus = {way: virtual(strategy, way == "no_sync") for way in ("reduced at once", "no_sync")}
        for way, gpu in gpus.items():
            sent, peak = (gpu.report()[name] / 2**20 for name in ("bytes sent", "peak allocated"))
            print(f"{strategy.name:10}  {way:15}  {sent:5,.0f} MiB sent, {peak:5,.0f} allocated")
    Path(__file__).with_suffix(".svg").write_text(svg({way: gpu.tape for way, gpu in gpus.items()}))


# %% [markdown]
# To gather the model, 512 MiB, a rank sends 7/8 of it, 448, and to reduce as much. FULL_SHARD has
# two gathers and a reduction for each micro-batch: 12 times 448. `no_sync` leaves out three
# reductions, a quarter. NO_SHARD, as DDP, only all-reduces, 896 each, and saves three quarters. And
# what waits is no chunk: until the other ranks have added theirs, a rank keeps its own of *all*
# parameters, 512 MiB.
#
# ![Two timelines of four forwards and backwards. Above, the reduce lane is busy in each backward.
# Below, it is empty until the fourth, and the memory climbs to twice the height.](20_no_sync.svg)
#
# The one thing to notice is the green area, memory over time, below the empty part of the `reduce`
# lane. The ramp of the first backward, 512 MiB, stays until the fourth has reduced it. The two
# after it are minifsdp's own: a backward that fails must leave nothing, so its gradients are added
# to what waits when it ends. One set, as in FSDP1, is 1.9 times the memory, not 2.3. With
# FULL_SHARD accumulate *without* `no_sync`, unless it is reductions that the GPU waits for. The
# sums are the same but for rounding, and those of `no_sync` are DDP's:


# %%
@on_ranks(2)
def against_ddp() -> None:
    trained = []
    for wrap in (DDP, FSDP):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
        torch.manual_seed(dist.get_rank())  # other data on every rank
        for _ in range(10):
            step(model, waits=True, samples=4, width=8)
        trained.append(torch.cat([value.flatten() for value in model.state_dict().values()]))
    print("equal in every bit:", torch.equal(*trained))


# %% [markdown]
# ## Clipping, and what breaks without it
#
# Clipping scales all gradients by `max_norm / norm`, if the norm of all together is larger than
# `max_norm`. No rank knows it, but the squares of the chunks' norms add up to its square. So
# `model.clip_grad_norm_()` all-reduces one number. `torch.nn.utils.clip_grad_norm_` would take a
# chunk for all there is, and chunks refuse it. Not so here. The gradient is `[3, 4, 0, 12]`:


# %%
@on_ranks(2)
def clip(whose: str, mean: list[float]) -> list[float]:
    model = FSDP(nn.Linear(4, 1, bias=False))
    model(torch.tensor([mean]) * (0.5 + dist.get_rank())).sum().backward()  # dy/dw = x
    (param,) = model.parameters()
    if whose == "torch's":
        param.is_sharded = False  # it is one
        torch.nn.utils.clip_grad_norm_([param], max_norm=1.0)
    else:
        model.clip_grad_norm_(max_norm=1.0)
    return [round(x, 2) for x in param.grad.tolist()]


def both() -> None:
    for whose in ("the model's", "torch's"):
        print(f"{whose:11} leaves, by rank: {clip(whose, [3.0, 4.0, 0.0, 12.0])}")


# %% [markdown]
# Its norm is 13; torch's divides by those of the chunks, 5 and 12. What comes out has norm 1.41 and
# points elsewhere than the gradient. The ranks do not even drift apart: they train one model,
# wrongly. (PyTorch's FSDP1 lets you do it. Its `model.clip_grad_norm_()` is right.)
#
# ## Predict, then run
#
# 1. `SHARD_GRAD_OP` gathers for each micro-batch, in `no_sync` once for all. What does that save?
# 2. Every rank's chunk has a norm below `max_norm`. Can there be anything to clip?


# %%
def answers() -> None:
    each, once = (virtual(SHARD_GRAD_OP, w).report()["bytes sent"] for w in (False, True))
    assert once / each == 2 / 8  # 1. six of eight: one gather and one reduction remain
    one, none = (virtual(FULL_SHARD, w, 2).report()["peak allocated"] for w in (True, False))
    assert round(one / none, 1) == 1.9  # with two micro-batches there is no second set
    assert clip("the model's", [0.8, 0.0, 0.0, 0.8])[0] == [0.71, 0.0]  # 2. yes: of norm 1.13


# %% [hidden]
def main() -> None:
    before_or_after()
    two_ways()
    against_ddp()
    both()
    answers()


if __name__ == "__main__":
    main()

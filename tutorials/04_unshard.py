"""Unshard: python tutorials/04_unshard.py; the page is 04_unshard.md."""

# %% [markdown]
# # Unshard: who keeps a tensor alive
#
# No layer can compute with a chunk. So FSDP gathers a layer's parameters just before it runs, frees
# them right after, and gathers them again for its backward. How to gather you have seen on page
# [01](01_collectives.md). How to free? Here are a weight of 4 MB, its use, and three ways.

# %% [hidden]
from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.collectives import all_gather
from minifsdp.flatten import unflatten

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def run_a_layer() -> tuple[Tensor, Tensor, Tensor]:
    flat = torch.ones(1_000_000, requires_grad=True)
    (weight,) = unflatten(flat, [torch.Size([1000, 1000])])
    x = torch.ones(1, 1000, requires_grad=True)
    return flat, x, x @ weight


def three_ways_to_free() -> None:
    for way in ("del flat", "flat.data = torch.empty(0)", "flat.untyped_storage().resize_(0)"):
        names = dict(zip(("flat", "x", "y"), run_a_layer(), strict=True), torch=torch)
        exec(way, names)
        saved = names["y"].grad_fn._saved_mat2
        print(f"{way:34} {saved.untyped_storage().nbytes():9,} bytes are still there")


# %% [markdown]
# A tensor has a shape and a *storage*. The memory is the storage's. Several tensors may share one,
# and it is freed when the last of them is gone. Here there are two, `flat` and its view `weight`.
# You have neither name any more in the first line, but the backward needs `weight` for the gradient
# of `x`, so autograd has *saved* it in the graph that `y` holds. Assigning to `flat.data` puts
# another storage under `flat`. The saved view has the old one.
#
# What helps is to shrink the storage itself, under everybody's eyes. Both tensors keep their shapes
# and have no memory. The backward will need it back, and how it is filled again matters:


# %%
def filled_again() -> None:
    for way in ("pass", "flat.copy_(ones)", "flat.data.copy_(ones)"):
        flat, x, y = run_a_layer()
        flat.untyped_storage().resize_(0)
        with torch.no_grad():
            if way != "pass":
                flat.untyped_storage().resize_(4_000_000)
            exec(way, {"flat": flat, "ones": torch.ones(1_000_000)})
        try:
            y.sum().backward()
            print(f"{way:21} gradient of x: {x.grad[0, 0]:.0f}, as it should be")
        except RuntimeError:
            print(f"{way:21} RuntimeError; flat's version is {flat._version}")


# %% [markdown]
# Not filled, it is an error if you are lucky. (A matrix product notices. The backward of `x * w`
# does not look, and crashes; on a CPU, at least.) Filled, the saved view has its numbers back: it
# is the *same* storage. But a tensor also has a *version*, which counts how often it was written
# to, and autograd refuses what was written to since it was saved. `.data` is another tensor with
# the same storage and a version of its own, so autograd does not see what is written through it.
# This may hide a mistake. Here the numbers are the old ones.
#
# In the engine a unit has two such tensors for its unsharded parameters: `flat_param` for autograd
# and `data`, its `.data`, for the collectives. They are made once; their storage comes and goes:
#
# {{ minifsdp/support/unsharded_storage.py UnshardedFlatParam.release }}
#
# {{ minifsdp/unshard.py unshard }}
#
# The heart is `launch`: make room, gather into it. (The rest is for pages [09](09_streams.md) and
# [17](17_offload.md).) Now four layers, each a unit, and the sizes of their storages in a step:


# %%
@on_ranks(2)
def a_step(strategy: ShardingStrategy) -> dict[str, list[int]]:
    layers, sizes = [nn.Linear(128, 128) for _ in range(4)], {}
    model = FSDP(nn.Sequential(*layers), sharding_strategy=strategy, backward_prefetch=None,
                 auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))  # fmt: skip

    def look(moment: str, *_: object) -> None:
        units = model.engine.units[1:]  # the first is the Sequential's, which has no parameters
        sizes[moment] = [unit.unsharded.flat_param.untyped_storage().nbytes() for unit in units]

    for i, layer in enumerate(layers, 1):
        layer.register_forward_hook(partial(look, f"forward of {i}"))
        layer.register_full_backward_pre_hook(partial(look, f"backward of {i}"))
    loss = model(torch.randn(4, 128, requires_grad=True)).sum()
    look("loss")
    loss.backward()
    look("end")
    return sizes


# %% [hidden]
def draw() -> None:
    rows = a_step(ShardingStrategy.FULL_SHARD)[0]
    rows["DDP, always"] = a_step(ShardingStrategy.NO_SHARD)[0]["loss"]
    parts = {row: {f"layer {i}": n for i, n in enumerate(sizes, 1)} for row, sizes in rows.items()}
    bars(PICTURE, "whole parameters of four layers in memory", parts, "{:,} bytes".format)


# %% [markdown]
# ![Eight bars, each as long as a layer and of its colour: 1 to 4 and back to 1. None at the loss
# and at the end. One for DDP that is four times as long.](04_unshard.svg)
#
# The one thing to notice: there is one layer at a time (nothing is gathered ahead), and none at the
# loss, though the graph has saved all four. (The chunks are there too, half of DDP's bar.)
#
# ## What breaks without it
#
# The same with `del`: each weight is gathered into a new tensor, used, and dropped.


# %%
@on_ranks(2)
def dropped() -> None:
    x, storages = torch.randn(4, 64, requires_grad=True), []
    for _ in range(4):
        full = torch.empty(64 * 64)
        all_gather(full, torch.randn(32 * 64), dist.group.WORLD, tag=0)()
        x = torch.tanh(x @ full.requires_grad_().view(64, 64))
        storages.append(StorageWeakRef(full.untyped_storage()))
        del full
    alive = [sum(not storage.expired() for storage in storages)]
    x.sum().backward()
    alive.append(sum(not storage.expired() for storage in storages))
    print(f"layers alive after the forward: {alive[0]}, after the backward: {alive[1]}")


# %% [markdown]
# All four, as with DDP. After the backward the saved views are gone, but the graph also holds each
# `full`, as the place for its gradient, until `x` is dropped. Nothing has complained.
#
# ## Predict, then run
#
# 1. Under `torch.no_grad()`, is `del` enough?
# 2. `SHARD_GRAD_OP` gathers once in a step, not twice. How many layers are whole at the loss?
# 3. The optimizer steps between a forward and its backward. What does autograd say?


# %%
def answers() -> None:
    without_graph = torch.no_grad()(run_a_layer)
    assert without_graph()[2].grad_fn is None  # 1. yes: there is no graph to hold it
    assert all(a_step(ShardingStrategy.SHARD_GRAD_OP)[0]["loss"])  # 2. four
    flat, x, y = run_a_layer()
    flat.data.mul_(2)  # what the second gather brings
    y.sum().backward()
    assert x.grad[0, 0] == 2000  # 3. nothing, and it is wrong; minifsdp checks, and refuses


# %% [hidden]
def main() -> None:
    three_ways_to_free()
    filled_again()
    draw()
    dropped()
    answers()


if __name__ == "__main__":
    main()

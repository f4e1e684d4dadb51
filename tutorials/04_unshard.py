"""Unshard: python tutorials/04_unshard.py; the page is 04_unshard.md."""

# %% [markdown]
# # Unshard: who keeps a tensor alive
#
# No layer can compute with a chunk. So FSDP gathers the parameters of a layer just before it runs,
# frees them right after, and gathers them again for its backward. To gather them is to *unshard*
# them, and to free them is to *reshard*. You have seen on page [01](01_collectives.md) how to
# gather. How do you free a tensor in Python? Here is a weight of 4 MB that a layer has just used,
# and three ways to get rid of it. Which of them give the memory back?

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
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.comm.collectives import all_gather
from minifsdp.core.flatten import unflatten

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
# Only the third. A tensor has a shape and a *storage*, and it is the storage that has the memory.
# Several tensors can share one storage, and its memory is freed when the last of them is gone. Here
# two share it, `flat` and its view `weight`.
#
# - `del flat` removes a name. But the backward needs `weight` for the gradient of `x`, so autograd
#   has *saved* that view in the graph that belongs to `y`.
# - Assigning to `flat.data` gives `flat` another storage. The saved view still has the old one.
# - `resize_(0)` shrinks the storage itself. Both tensors keep their shapes, and have no memory.
#
# The backward will need the numbers again, so the storage is made large again and filled. It
# matters how that is done:


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
# If it is not filled, there is an error, with some luck. (A matrix product checks whether there is
# memory. The backward of `x * w` does not, and on a CPU the process crashes.)
#
# If it is filled, the saved view has its numbers back, because it has the *same* storage. But a
# tensor also has a *version*, which counts how often it was written to. Autograd notes the version
# when it saves a tensor, and refuses the tensor if it has been written to since. That is the second
# line. The third writes through `flat.data`, which is a second tensor with the same storage and a
# version of its own, so autograd does not see it. In general this hides mistakes. Here it is right,
# because the numbers that come back are those that were there.
#
# In the engine each unit has two such tensors for its whole parameters: `flat_param`, which
# autograd knows, and `data`, which is its `.data` and gets what is gathered. Both are made once,
# and their storage comes and goes. This is how it goes:
#
# {{ minifsdp/core/storage.py UnshardedFlatParam.free }}
#
# And this is how it comes. (`...` stands for lines that are left out: they have to do with streams,
# page [09](09_streams.md), and with units that are not sharded. `source` gives this rank's shard;
# with parameters on the host, page [17](17_offload.md), it is copied first.) Find the line that
# makes room, and the one that gathers:
#
# {{ minifsdp/core/unshard.py unshard -Start to -assert -start_unshard -Taken before
# -Allocated -all-gather can -if group is }}
#
# Now the GPT of `make demo`. Each of its four blocks is a unit. What is in no block, the embeddings
# and the head, is one more unit, the *root*. How large are the storages of the blocks during a
# step?


# %%
@on_ranks(2)
def a_step(strategy: ShardingStrategy) -> dict[str, list[int]]:
    gpt = GPT(layers=4, width=128)
    blocks, sizes = [*gpt.blocks], {}
    model = FSDP(gpt, sharding_strategy=strategy, backward_prefetch=None,
                 auto_wrap_policy=ModuleWrapPolicy({Block}))  # fmt: skip

    def look(moment: str, *_: object) -> None:
        units = model.engine.units[1:]  # the first is the root
        sizes[moment] = [unit.unsharded.flat_param.untyped_storage().nbytes() for unit in units]

    for i, block in enumerate(blocks, 1):
        block.register_forward_hook(partial(look, f"forward of {i}"))
        block.register_full_backward_pre_hook(partial(look, f"backward of {i}"))
    loss = model(torch.zeros(1, 8, dtype=torch.long)).sum()
    look("loss")
    loss.backward()
    look("end")
    return sizes


# %% [hidden]
def draw() -> None:
    rows = a_step(ShardingStrategy.FULL_SHARD)[0]
    rows["DDP, always"] = a_step(ShardingStrategy.NO_SHARD)[0]["loss"]
    parts = {row: {f"block {i}": n for i, n in enumerate(sizes, 1)} for row, sizes in rows.items()}
    bars(PICTURE, "whole parameters of the four blocks in memory", parts, "{:,} bytes".format)
    one = 4 * sum(p.numel() for p in Block(128).parameters())
    found = [sum(sizes) for sizes in rows.values()]
    assert found == [one] * 4 + [0] + [one] * 4 + [0, 4 * one]


# %% [markdown]
# ![Eight bars, each as long as a block and of its colour: 1 to 4 and back to 1. None at the loss
# and at the end. One for DDP that is four times as long.](04_unshard.svg)
#
# There is one block at a time, and none at the loss, though autograd's graph has saved views of all
# four. (The rank's own chunks are there as well, always. With two ranks they are half as long as
# DDP's bar. Nothing is gathered ahead of time here; page [12](12_prefetch.md) does that.)
#
# ## What breaks without it
#
# Write the obvious code: gather each weight into a new tensor, use it, and `del` it. How many of
# four weights are in memory after the forward, and how many after the backward?


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
    print(f"weights in memory after the forward: {alive[0]}, after the backward: {alive[1]}")


# %% [markdown]
# All four, as with DDP, and even after the backward. By then the saved views are gone, but the
# graph also refers to each `full`, because its gradient belongs there, until `x` is dropped. The
# program is right in every number. It gathers in every step, and saves no memory at all.
# (`StorageWeakRef` lets us ask whether a storage is still there without keeping it.)
#
# ## Predict, then run
#
# 1. Under `torch.no_grad()`, is `del` enough?
# 2. The strategy `SHARD_GRAD_OP` gathers once in a step instead of twice. How many blocks are whole
#    at the loss?
# 3. The optimizer steps between a forward and its backward, and doubles the weight. The backward
#    gathers again, through `.data`. What does autograd say?
#
# <details><summary>Answers</summary>
#
# 1. Yes. There is no graph then, so nothing but the name refers to the view.
# 2. All four. It frees them only after their backward.
# 3. It says nothing, and the gradient of `x` is wrong: 2000 instead of 1000. With an ordinary
#    tensor autograd would have seen the version and refused. minifsdp looks for this case itself,
#    and refuses.
#
# </details>


# %% [hidden]
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

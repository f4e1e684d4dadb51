"""Materialize: python tutorials/18_materialize.py; the page is 18_materialize.md."""

# %% [markdown]
# # Materialize: a model that never exists whole
#
# So far there was a model, and FSDP cut it up. A GPT of 7 billion parameters takes 27 GB, and each
# of the eight processes on a machine builds one. That is 214 GB before the first chunk is cut. And
# of the random numbers that each of them has drawn, it will keep an eighth.
#
# PyTorch can build a model without all that. On the *meta* device a tensor has a shape and a dtype,
# but no memory, and operations only find out which shape comes out:

# %% [hidden]
import gc
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, ShardingStrategy
from minifsdp.shard import shard
from minifsdp.sim import cluster
from minifsdp.sim.training.presets import MODELS

META, LINEAR = torch.device("meta"), ModuleWrapPolicy({nn.Linear})


def held() -> float:
    """MiB of all tensors of this process, each piece of memory once."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) / 2**20


# %%
def seven_billion() -> None:
    with torch.device("meta"):
        params = list(MODELS["gpt-7b"].build().parameters())
    size, addresses = sum(param.nbytes for param in params), {param.data_ptr() for param in params}
    print(f"{size / 1e9:.1f} GB, {8 * size / 1e9:.0f} GB for eight, at the addresses {addresses}")


# %% [markdown]
# Memory and values come when FSDP makes a unit, inner units first. Each gets memory, gets values,
# and is cut to a chunk before the next one gets anything:
#
# {{ minifsdp/wrapping/materialize.py materialize }}
#
# Values come from one of three places. Most of torch's own modules have `reset_parameters()`, which
# they call when they are built. For others there is `param_init_fn`, a function of yours, called
# with each module, on meta. Or rank 0 has read a checkpoint: there the model is
# built as usual, elsewhere on meta, and with `sync_module_states=True` rank 0 sends what it has,
# unit by unit. Here are sixteen layers of 1 MiB, on four ranks. (`held()` is in MiB.)


# %%
def build(device: torch.device, **settings: Any) -> dict[str, float]:
    gc.collect()
    before, moments = held(), []

    def cut(flat: torch.Tensor, *arguments: Any) -> torch.Tensor:
        chunk = shard(flat, *arguments)
        parts = {"chunks": (len(moments) + 1) * chunk.nbytes / 2**20, "layers": 0.0}
        parts["one laid end to end"] = flat.nbytes / 2**20
        moments.append(parts | {"layers": round(held() - before - sum(parts.values()), 2)})
        return chunk

    with device:
        module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    with patch("minifsdp.shard.shard", cut):
        _model = FSDP(module, auto_wrap_policy=LINEAR, **settings)
    assert round(held() - before, 2) == 4  # all chunks, and nothing else
    return max(moments, key=lambda parts: sum(parts.values()))


@on_ranks(4)
def three_ways() -> list[dict[str, float]]:
    here = torch.get_default_device()
    there = here if dist.get_rank() == 0 else META
    memory = partial(nn.Module.to_empty, device=here, recurse=False)  # and no values
    return [build(here), build(there, sync_module_states=True, param_init_fn=memory), build(META)]


def draw() -> None:
    (whole, sender, _), *_, (_, receiver, meta) = three_ways()
    rows = {"all ranks build it": whole, "rank 0 builds it and sends": sender}
    rows |= {"the others receive": receiver, "all have it on meta": meta}
    title = "at most on each of four ranks, for a model of 16 MiB"
    bars(Path(__file__).with_suffix(".svg"), title, rows, "{:g} MiB".format)


# %% [markdown]
# ![Four bars of parts. Where the model is built: 0.25 MiB of chunks, 16 of layers, 1 of a layer
# laid end to end. Where it is received or on meta: 4, 1 and 1 MiB.](18_materialize.svg)
#
# The one thing to notice: where the model is built, most is there when the first layer is cut: all
# layers, one of them laid end to end, and its chunk. Elsewhere it is when the last is cut: that
# layer, twice, and all chunks. These 4 MiB stay. Rank 0 has to have what it sends.
#
# Buffers are on meta, too. What `reset_parameters()` forgets to fill is whatever was in that
# memory, and nobody can tell. Two other mistakes are told, by name: a module that has no way to its
# values, and a function that sets values where there is no memory yet:


# %%
class Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.scale = nn.Parameter(torch.ones(2))


def refused() -> None:
    for init_fn in (None, lambda module: [nn.init.ones_(p) for p in module.parameters()]):
        with cluster(kind="cpu"):
            with META:
                module = Scaled()
            try:
                FSDP(module, auto_wrap_policy=LINEAR, param_init_fn=init_fn)
            except ValueError as error:
                print(error)


# %% [markdown]
# ## What breaks without it
#
# Rank 0 has read a checkpoint, a unit matrix. Rank 1 has not. They are wrapped without and with
# `sync_module_states`, and the parameter is gathered:


# %%
@on_ranks(2)
def gathered(strategy: ShardingStrategy, sync: bool) -> list[list[float]]:
    torch.manual_seed(dist.get_rank())
    layer = nn.Linear(2, 2, bias=False)
    if dist.get_rank() == 0:
        nn.init.eye_(layer.weight)
    model = FSDP(layer, sharding_strategy=strategy, sync_module_states=sync)
    return [[round(x, 2) for x in row] for row in model.state_dict()["weight"].tolist()]


def patchwork() -> None:
    for sync in (False, True):
        print(f"sync_module_states={sync}: {gathered(ShardingStrategy.FULL_SHARD, sync)[0]}")


# %% [markdown]
# Each rank has cut its chunk out of its own model. Together they are a patchwork that no rank ever
# had, half a checkpoint and half noise. Nothing is refused: minifsdp compares names and sizes of
# units between ranks, not their values. (A patchwork of noise and noise is noise, and does less
# harm. But it is another one for each number of ranks. Give them all the same seed.)
#
# ## Predict, then run
#
# 1. Without `sync_module_states`, but with `NO_SHARD`, what has rank 1?
# 2. The sixteen layers are on the CPU, and there are eight GPUs. `FSDP(model.to(device))` needs
#    more than 16 MiB of each. What does `FSDP(model, device_id=device)` need?


# %%
def answers() -> None:
    checkpoint, other = gathered(ShardingStrategy.NO_SHARD, False)
    assert checkpoint == [[1, 0], [0, 1]] != other  # 1. its noise: there are two models
    with cluster(gpus_per_node=8) as gpu:
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
        FSDP(model, auto_wrap_policy=LINEAR, device_id=torch.get_default_device())
    assert gpu.allocator.allocated.peak == 4 * 2**20  # 2. it moves layers one at a time: 2 + 1 + 1


# %% [hidden]
def main() -> None:
    seven_billion()
    draw()
    refused()
    patchwork()
    answers()


if __name__ == "__main__":
    main()

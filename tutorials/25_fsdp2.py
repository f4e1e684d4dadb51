"""FSDP2: python tutorials/25_fsdp2.py; the page is 25_fsdp2.md."""

# %% [markdown]
# # FSDP2: rows instead of chunks
#
# Weight decay should spare biases, so you sort parameters by name, and find one: `_flat_param`. So
# it is in minifsdp and in FSDP1 without `use_orig_params=True`, but not in FSDP2, `fully_shard`
# ([pytorch#114299](https://github.com/pytorch/pytorch/issues/114299)). Here are both:

# %% [hidden]
import warnings
from itertools import groupby
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from draw import strips
from launch import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.streams import Streams

COLOURS = ("gray", "blue", "amber", "purple", "orange", "green", "red")


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fsdp2(module):
    kind = next(module.parameters()).device.type
    return fully_shard(module, mesh=init_device_mesh(kind, (torch.distributed.get_world_size(),)))


def train(model, digits=4):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        losses.append(model(torch.randn(8, 4)).pow(2).mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [f"{loss:.{digits}g}" for loss in losses]


@on_ranks(3)
def layout():
    models = [block(), block()]
    for model in models:
        for number, param in enumerate(model.parameters(), 1):
            param.data.t().copy_(100 * number + torch.arange(len(param)))  # the same along a row
    a, b = FSDP(models[0]).engine.root, fsdp2(models[1])
    return [a.padded_shard.tolist()], [p.to_local().flatten().tolist() for p in b.parameters()]


def draw():
    ranks, rows = layout(), []
    for way, title in enumerate(("one flat tensor: chunks, FSDP1", "each by its rows: FSDP2")):
        rows.append((title, []))
        for rank, held in enumerate(ranks):
            values = []
            for piece, longest in zip(held[way], ranks[0][way], strict=True):
                values += piece + [0.0] * (len(longest) - len(piece))
            runs = [(int(value), len(list(same))) for value, same in groupby(values)]
            boxes = [(n, COLOURS[v // 100], f"row {v % 100}" if v else "") for v, n in runs]
            rows.append((f"rank {rank}", boxes))
    legend = dict(zip(COLOURS, ("padding", *dict(block().named_parameters())), strict=True))
    strips(Path(__file__).with_suffix(".svg"), "a block on three ranks", rows, legend)


# %%
@on_ranks(2)
def side_by_side() -> None:
    for wrap in (FSDP, fsdp2):
        model = wrap(block())
        print(f"{type(model).__name__:24}", *train(model))
        for name, param in model.named_parameters() if torch.distributed.get_rank() == 1 else ():
            here = param.to_local() if wrap is fsdp2 else param
            print(f"    {name:11} {tuple(param.shape)}, of which here {tuple(here.shape)}")
    chunks, rows = FSDP(block()), FSDP(block(), use_orig_params=True)
    assert train(chunks, 9) == train(rows, 9) == train(fsdp2(block()), 9)


# %% [markdown]
# From one seed, on the same data, the losses are equal in nine digits. `fully_shard` makes a unit
# of a module's parameters that no unit inside has; hooks gather it before use and free it after.
#
# There is no wrapper: the module's class becomes a subclass, and names stay. A parameter is a
# *DTensor*, which knows its whole shape and holds some of its rows. The block on three ranks:
#
# ![Two groups of three strips. Above, row 2 of a weight is half on rank 0, half on rank 1. Below,
# rows are whole, and rank 2 has gray padding where there were not enough of them.](25_fsdp2.svg)
#
# The one thing to notice is row 2 of the purple weight, cut in two above. Widths are elements,
# colours parameters. Below no row is cut, but each parameter is padded: a rank sends 21, not 18.


# %% [markdown]
# ## What breaks without rows
#
# A flat tensor has one `requires_grad`. (FSDP1's `use_orig_params=True` takes a mixture, and has a
# gradient for all of it.) You fine-tune, and one bias has to stay as it is:


# %%
@on_ranks(1)
def one_frozen_bias() -> None:
    for wrap in (FSDP, fsdp2):
        model = block()
        model[1].bias.requires_grad = False
        try:
            print("fully_shard:", *train(wrap(model)))
        except ValueError as refusal:
            print("minifsdp, chunks:", refusal)


# %% [markdown]
# Much else works as always where parameters are parameters: decay by name, an optimizer that looks
# at whole rows, `torch.nn.utils.clip_grad_norm_`. And a state dict of DTensors needs no gather.
# minifsdp has rows, too: `use_orig_params=True` and `minifsdp.fully_shard` make them, page
# [26](26_rows.md) says how.
#
# ## What it costs, and what it buys
#
# A collective wants one piece of memory. So rows are copied into a buffer and, when all have
# arrived, out of it to where the parameters are. minifsdp gathers chunks straight into the memory
# layers compute with. But that copy is good for something. On page [11](11_limiter.md) tensors of
# 16 MB, made on one stream and read on another, took 320 MiB, or the host had to wait. FSDP2 has no
# limiter and does not call `record_stream`. Only the copy reads the buffer, and is soon over, so
# the next gather can wait for it. What layers read is the compute stream's own. Again:


# %%
def twenty_layers(copied: bool) -> VirtualGpu:
    with cluster() as gpu:
        streams = Streams.on(torch.device("meta"))
        for _ in range(20):
            with gpu.on("unshard"):
                gathered = torch.ones(4_000_000)
            streams.unshard.record_event().wait()  # the compute stream waits for the gather
            full = gathered.clone() if copied else gathered
            streams.unshard.wait_event(streams.compute.record_event())  # and the next one for this
            del gathered
            gpu.clock.launch("compute", 0.01)
            full.add_(1)
            del full
    return gpu


def with_a_copy() -> None:
    gpu = twenty_layers(copied=True)
    mib, host, device = gpu.allocator.reserved.peak / 2**20, gpu.clock.now, gpu.clock.idle_at()
    print(f"{mib:.0f} MiB, {len(gpu.races())} races; host done at {host:.3f} of {device:.3f} s")


# %% [markdown]
# That is one buffer and one layer, however far the host is ahead. (FSDP2 has a second buffer in the
# forward.) It prefetches in the backward; `set_modules_to_forward_prefetch` is for the forward.
#
# ## Predict, then run
#
# 1. A head has one row, `nn.Linear(1000, 1)`. How much of its weight does each rank update?
# 2. Leave the copy out, and every wait where it is. What does the virtual GPU say?


# %%
@on_ranks(2)
def head() -> int:
    return fsdp2(nn.Linear(1000, 1)).weight.to_local().numel()


def answers() -> None:
    assert head() == [1000, 0]  # 1. rank 0 all of it, rank 1 nothing
    assert twenty_layers(copied=False).races()  # 2. gathers write over what is still being read


# %% [hidden]
def main() -> None:
    for experiment in (side_by_side, draw, one_frozen_bias, with_a_copy, answers):
        experiment()


if __name__ == "__main__":
    main()

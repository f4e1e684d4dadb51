"""FSDP2: python tutorials/25_fsdp2.py; the page is 25_fsdp2.md."""

# %% [markdown]
# # FSDP2: rows instead of chunks
#
# You fine-tune the GPT of `make demo`, and its LayerNorms shall stay as they are. So you look for
# parameters with "norm" in their names, and find none. Each unit has one parameter, `_flat_param`.
# That is how it is in minifsdp, and how it was in PyTorch's first FSDP (unless one passes
# `use_orig_params=True`). PyTorch has since rewritten FSDP around this problem. The new one is
# called `fully_shard`, or *FSDP2*
# ([pytorch#114299](https://github.com/pytorch/pytorch/issues/114299)). What did it change, and what
# does that cost? Here is one block of the GPT under both, as rank 0 of two sees it:

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
from torch.nn.functional import cross_entropy
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.core.streams import Streams
from minifsdp.sim import VirtualGpu, cluster

POLICY = ModuleWrapPolicy({Block})
COLOURS = ("gray", "blue", "amber", "purple", "orange", "green", "red")


def gpt():
    torch.manual_seed(0)
    return GPT(layers=2, width=128)


def mesh():
    return init_device_mesh(torch.get_default_device().type, (torch.distributed.get_world_size(),))


def say(*words):
    if torch.distributed.get_rank() == 0:
        print(*words)


def train(model):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.003), []
    for step in range(3):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        tokens = ((torch.randint(26, (2, 1)) + torch.arange(32)) % 26).to(mesh().device_type)
        logits = model(tokens)
        losses.append(cross_entropy(logits.flatten(0, 1), (tokens.flatten() + 1) % 26))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def small_block():
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@on_ranks(3)
def layout():
    models = [small_block(), small_block()]
    for model in models:
        for number, param in enumerate(model.parameters(), 1):
            param.data.t().copy_(100 * number + torch.arange(len(param)))  # the same along a row
    a, b = FSDP(models[0]).engine.root, fully_shard(models[1], mesh=mesh())
    return [a.padded_shard.tolist()], [p.to_local().flatten().tolist() for p in b.parameters()]


def draw():
    ranks, rows = layout(), []
    for way, title in enumerate(("in chunks: one flat tensor, cut in three", "in rows: FSDP2")):
        rows.append((title, []))
        for rank, held in enumerate(ranks):
            values = []
            for piece, longest in zip(held[way], ranks[0][way], strict=True):
                values += piece + [0.0] * (len(longest) - len(piece))
            runs = [(int(value), len(list(same))) for value, same in groupby(values)]
            boxes = [(n, COLOURS[v // 100], f"row {v % 100}" if v else "") for v, n in runs]
            rows.append((f"rank {rank}", boxes))
            assert len(values) == (18, 21)[way]  # elements that each rank sends
    names = ("padding", *dict(small_block().named_parameters()))
    legend = dict(zip(COLOURS, names, strict=True))
    title = "What each of three ranks has of two linear layers and a LayerNorm; widths are elements"
    strips(Path(__file__).with_suffix(".svg"), title, rows, legend)


# %%
def fsdp2(model: GPT) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return fully_shard(model, mesh=mesh())


@on_ranks(2)
def side_by_side() -> list[list[float]]:
    found = []
    for model in (FSDP(gpt(), auto_wrap_policy=POLICY), fsdp2(gpt())):
        say(type(model).__name__)
        for name, param in model.named_parameters():
            if "blocks.0" in name:
                here = param.to_local() if hasattr(param, "to_local") else param
                say(f"    {name:23} {tuple(param.shape)}, of which here {tuple(here.shape)}")
        found.append(train(model))
        say("    losses:", *(f"{loss:.3f}" for loss in found[-1]))
    return found


# %% [markdown]
# `fully_shard` is called on each block, then on the model. Each call makes a unit of the parameters
# that no unit inside has, as a policy does in FSDP. As in FSDP, hooks gather a unit before it is
# used and free it afterwards. Two things are different:
#
# - There is no wrapper. The module stays where it is, and only its class becomes a subclass, with
#   hooks: a `Block` becomes an `FSDPBlock`. So names stay what they were.
# - A parameter stays a parameter of its own, a *DTensor* ("distributed tensor"). It knows the
#   whole shape, `(384, 128)` for instance, and which part of it this rank has: 192 of the 384
#   *rows*. A row of a matrix is what has one index along its first dimension.
#
# The losses are the same, in every bit. Both gather whole parameters to compute with, so it makes
# no difference to them who keeps which numbers in the meantime. This picture shows who does, for
# two small layers and a LayerNorm on three ranks:
#
# ![Two groups of three strips. Above, a flat tensor is cut in three, and row 2 of the purple weight
# is half on rank 0 and half on rank 1. Below, each parameter is cut by itself, between rows, and
# rank 2 has gray padding where there were not enough rows.](25_fsdp2.svg)
#
# Look for row 2 of the purple weight. In chunks one half of it is on rank 0 and the other half on
# rank 1. In rows no row is ever cut. The price is padding: each parameter is padded for itself
# and not the unit once, so in this example a rank sends 21 elements and not 18.
#
# ## What breaks without rows
#
# A tensor has one `requires_grad`. So a flat tensor is frozen or trained as a whole. Let us try to
# freeze the LayerNorms after all:


# %%
@on_ranks(2)
def frozen_norms() -> None:
    for wrap in (lambda model: FSDP(model, auto_wrap_policy=POLICY), fsdp2):
        model = gpt()
        for name, param in model.named_parameters():
            param.requires_grad = "norm" not in name
        try:
            say("fully_shard trains:", *(f"{loss:.3f}" for loss in train(wrap(model))))
        except ValueError as refusal:
            say("in chunks:", refusal)


# %% [markdown]
# minifsdp refuses, because there is no right answer in chunks. (With `use_orig_params=True`
# PyTorch's first FSDP takes such a model, but
# [its documentation](https://docs.pytorch.org/docs/stable/fsdp.html) recommends to avoid that, as
# gradients take more memory than one expects: they are there for the frozen parameters, too.) The
# same goes for all that treats parameters as parameters: less weight decay for some, an optimizer
# that looks at a matrix by its rows, a norm for each layer.
#
# minifsdp has rows as well: `FSDP(..., use_orig_params=True)` and `minifsdp.fully_shard` make them.
# Page [26](26_rows.md) shows how that works.
#
# ## What it costs, and what it buys
#
# A collective sends one piece of memory. So FSDP2 copies the rows of a unit into one buffer before
# a gather. And what has arrived is sorted by ranks, not by parameters, so it is copied once more,
# out of the buffer to where each parameter is whole. minifsdp saves both copies in chunks: it
# gathers straight into the memory that layers compute with.
#
# But the copy is good for something. Remember why FSDP needs a limiter (page [11](11_limiter.md)):
# memory that is made on one stream and read on another cannot be given out again before the read
# *has happened*, on a GPU that is far behind the host. In FSDP2 the layer does not read what was
# gathered. It reads the copy, which is made on its own stream. Only the copying itself reads the
# buffer, and it is soon over, so the next gather can simply wait for it, as one stream waits for
# another. FSDP2 has no limiter and does not call `record_stream`. Here is the experiment of page 11
# again, twenty tensors of 16 MB, both ways:


# %%
def twenty_layers(copied: bool, record: bool = False) -> VirtualGpu:
    with cluster() as gpu:
        streams = Streams.on(torch.device("meta"))
        for _ in range(20):
            with gpu.on("unshard"):
                gathered = torch.ones(4_000_000)
            streams.unshard.record_event().wait()  # the compute stream waits for the gather
            full = gathered.clone() if copied else gathered
            streams.unshard.wait_event(streams.compute.record_event())  # the next gather, for this
            if record:
                streams.compute.record_stream(gathered)
            del gathered
            gpu.clock.launch("compute", 0.01)
            full.add_(1)
            del full
    return gpu


def with_and_without_a_copy() -> None:
    for words, gpu in {
        "read in place, record_stream": twenty_layers(copied=False, record=True),
        "copied, without record_stream": twenty_layers(copied=True),
    }.items():
        mib, host, device = gpu.allocator.reserved.peak / 2**20, gpu.clock.now, gpu.clock.idle_at()
        print(f"{words:30} {mib:3.0f} MiB reserved, {len(gpu.races())} races; "
              f"the host is done at {host:.3f} s, the GPU at {device:.3f} s")  # fmt: skip


# %% [markdown]
# With the copy 32 MiB are enough, for one buffer and one layer, and the host never has to wait. In
# the forward FSDP2 keeps a second buffer, so that the next gather can begin while this copy is
# being made. It prefetches in the backward by itself, as page [13](13_targets.md) describes; for
# the forward you may name the units with `set_modules_to_forward_prefetch`.
#
# ## Predict, then run
#
# 1. A head has one output, `nn.Linear(1000, 1)`. Its weight has one row. How many of its elements
#    does each of two ranks update?
# 2. Leave out the copy and `record_stream`, and keep every wait where it is. What does the virtual
#    GPU say?
# 3. The first block has 198,272 parameters. How many has the `_flat_param` of the root, if the
#    whole GPT has 470,528?
#
# <details><summary>Answers</summary>
#
# 1. Rank 0 updates all 1,000, and rank 1 none. A row is never cut.
# 2. It reports races. The allocator gives the same memory to the next gather, which does not wait
#    for the layer that still reads it: it writes while that computes.
# 3. 73,984: the two blocks have a unit each, and the root has the rest.
#
# </details>


# %% [hidden]
@on_ranks(2)
def head() -> int:
    return fully_shard(nn.Linear(1000, 1), mesh=mesh()).weight.to_local().numel()


@on_ranks(1)
def root() -> list[int]:
    model = FSDP(gpt(), auto_wrap_policy=POLICY)
    return [param.numel() for param in model.parameters()]


def answers() -> None:
    assert 4 * 4_000_000 == 16e6  # bytes of each of the twenty tensors
    assert head() == [1000, 0]  # 1. rank 0 all of it, rank 1 nothing
    assert twenty_layers(copied=False).races()  # 2. gathers write over what is still being read
    assert root() == [[73_984, 198_272, 198_272]]  # 3. the rest; 470,528 in all
    assert sum(param.numel() for param in gpt().parameters()) == 470_528


# %% [hidden]
def main() -> None:
    for found in side_by_side():
        assert found[0] == found[1]  # chunks and rows, in every bit
    for experiment in (draw, frozen_norms, with_and_without_a_copy, answers):
        experiment()


if __name__ == "__main__":
    main()

"""Rows: python tutorials/26_rows.py; the page is 26_rows.md."""

# %% [markdown]
# # Rows: parameters that keep their names
#
# Weight decay pulls parameters towards zero in each step. It is meant for matrices. Biases and the
# weights of LayerNorms are usually spared, and a training program does that by their names: it
# makes two groups of parameters for the optimizer, each with its own `weight_decay`.
#
# Page [25](25_fsdp2.md) has shown two ways to divide a unit among ranks, in *chunks* of one flat
# tensor and in *rows* of each parameter. minifsdp can do both; `use_orig_params=True` asks for
# rows. Here the GPT of `make demo`, with two blocks, is trained in both ways and under DDP. Which
# lines will say True?

# %% [hidden]
import warnings
from functools import partial
from pathlib import Path
from unittest import TestCase, mock

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from draw import strips
from launch import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.comm import unit_messages
from minifsdp.comm.blocks import by_rank
from minifsdp.comm.collectives import reduce_scatter
from minifsdp.core.streams import Streams
from minifsdp.rows import Rows, check_divisible
from minifsdp.sim import VirtualGpu, cluster

POLICY = ModuleWrapPolicy({Block})


def gpt():
    torch.manual_seed(0)
    return GPT(layers=2, width=128)


def loss_of(model):
    letters = (torch.randint(26, (2, 1)) + torch.arange(32)) % 26
    return cross_entropy(model(letters).flatten(0, 1), (letters.flatten() + 1) % 26)


def say(*words):
    if dist.get_rank() == 0:
        print(*words)


# %%
WAYS = {
    "DDP": DDP,
    "chunks": partial(FSDP, auto_wrap_policy=POLICY),
    "rows": partial(FSDP, auto_wrap_policy=POLICY, use_orig_params=True),
}


def train(model: nn.Module, spared: tuple[str, ...]) -> list[torch.Tensor]:
    groups = [{"params": [], "weight_decay": 0.5}, {"params": [], "weight_decay": 0.0}]
    for name, param in model.named_parameters():
        groups[any(word in name for word in spared)]["params"].append(param)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.003)
    torch.manual_seed(dist.get_rank())  # other data on every rank
    for _ in range(5):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss, *model.state_dict().values()]


@on_ranks(2)
def weight_decay() -> None:
    for spared in ((), ("norm", "bias")):
        ddp, *others = [train(wrap(gpt()), spared) for wrap in WAYS.values()]
        for way, found in zip(("chunks", "rows"), others, strict=True):
            equal = all(map(torch.equal, ddp, found))
            who = ", ".join(spared) or "nothing"
            say(f"spared: {who:10} in {way:6} loss {found[0]:.3f}; as DDP, bit for bit: {equal}")


# %% [markdown]
# ## What breaks without names
#
# In chunks a parameter of the optimizer is a flat tensor, `blocks.0._flat_param`, and no name has
# "norm" or "bias" in it. So the second group stays empty, and everything decays. There is no error,
# and the loss still falls. (minifsdp warns of such a choice by names, but this page has switched
# warnings off. PyTorch's first FSDP says nothing.) In rows the same program does what it says.
#
# ## Where the rows are
#
# Here is one linear layer on two ranks. Its weight is `[3, 2]`, with the rows `a`, `b` and `c` of
# two elements each. Its bias has the three elements `x`, `y`, `z`, which are rows of one element:


# %% [hidden]
@on_ranks(2)
def layouts():
    found, colour = [], ("blue", "orange")[dist.get_rank()]
    for settings in ({}, {"use_orig_params": True}):
        layer, full = nn.Linear(2, 3), []
        nn.utils.vector_to_parameters(torch.arange(1.0, 10), layer.parameters())
        unit = (model := FSDP(layer, **settings)).engine.root
        layer.register_forward_hook(lambda *_, u=unit, f=full: f.extend(u.unsharded.data.int()))
        model(torch.ones(2))
        at = torch.cat(by_rank(torch.arange(len(full)), unit.layout.blocks, 2)[dist.get_rank()])
        assert [full[i] for i in at] == unit.padded_shard.tolist()
        del full[12 if settings else 10 :]  # after them rows have marks, which are all zero
        boxes = [(1, colour if n else "gray", "0aabbccxyz"[n]) for n in full]
        found.append([box if i in at else (1, "", "") for i, box in enumerate(boxes)])
    assert unit.layout.blocks[:2] == [4, 2]
    return found


def draw():
    titles = {"in chunks: each rank has one piece of the flat tensor": 6}
    titles["in rows: each rank has a block of the weight and a block of the bias"] = 8
    strip = []
    for (title, weight), *ranks in zip(titles.items(), *layouts(), strict=True):
        names = [(weight, "", "weight"), (len(ranks[0]) - weight, "", "bias")]
        strip += [(title, []), ("", names), ("rank 0", ranks[0]), ("rank 1", ranks[1])]
    title = "Which elements of one unsharded linear layer each of two ranks keeps"
    strips(Path(__file__).with_suffix(".svg"), title, strip)


# %% [markdown]
# ![Two groups of two strips. Above, in chunks, rank 0 has a, a, b, b, c, and rank 1 has c, x, y, z
# and a zero. Below, in rows, rank 0 has a, a, b, b of the weight and x, y of the bias, and rank 1
# has c, c and two zeros, then z and a zero.](26_rows.svg)
#
# What one rank has of one parameter is called a *block* here. Above, row `c` is cut in two. Below
# it is on rank 1 as a whole, and each parameter has padding of its own. The padding has a reason:
# NCCL's collectives take equally many elements from each rank, and each parameter has to be in the
# same place on all ranks. Three rows on two ranks are two rows and one row, so the last rank gets a
# row of zeros.
#
# ## The same collectives
#
# A gathered unit looks the same in both ways, apart from the padding. It is one flat tensor in
# which all parameters lie end to end, and layers compute with views of it, as on page
# [02](02_flatten.md). (In both ways parameters whose number of elements is no multiple of 8 come
# last; in rows their padding counts.) Only the cut is different. A rank's shard is its blocks, put
# together:
#
# {{ minifsdp/rows.py Rows.shard -The blocks }}
#
# {{ minifsdp/comm/blocks.py of_rank -A copy of }}
#
# `blocks` has the size of one block of each parameter, 4 and 2 for this layer. `_matrices` cuts
# the flat tensor into parameters, and each of these into one block for each rank. For chunks
# `blocks` is None. All-gather and reduce-scatter take `blocks` as an argument. On a CPU each block
# is sent straight from its place on one rank to its place on another. NCCL wants all that belongs
# to one rank in one piece, so on a GPU blocks are copied together before a reduction, and apart
# after a gather. This is the copy that FSDP2 makes, too.
#
# What the optimizer sees are `DTensor`s, which know that other ranks have more rows. The norm of a
# DTensor is that of all its rows, on all ranks. So `torch.nn.utils.clip_grad_norm_`, which is
# refused for chunks because it would see one rank's chunks only, is right here:


# %%
@on_ranks(2)
def clip() -> None:
    for name in ("DDP", "rows"):
        model = WAYS[name](gpt())
        torch.manual_seed(dist.get_rank())
        loss_of(model).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        say(f"{name}: the norm of all gradients is {norm.item():.3f}")


# %% [markdown]
# ## What is frozen is not reduced
#
# Fine-tuning often trains a small part of a model and *freezes* the rest: frozen parameters have
# `requires_grad=False` and get no gradient. (In chunks a unit is frozen as a whole; page
# [25](25_fsdp2.md).) In rows a unit lays its frozen parameters at the end of the flat tensor. Then
# all that has a gradient is one piece at its beginning, and only that is reduced. Here only vectors
# are trained, the biases and the LayerNorms, and all matrices are frozen:


# %%
@on_ranks(2)
def only_vectors() -> None:
    for trained in ("everything", "only vectors"):
        model = WAYS["rows"](gpt())
        for param in model.parameters():
            param.requires_grad_(trained == "everything" or param.dim() == 1)
        with mock.patch.object(unit_messages, "reduce_scatter", wraps=reduce_scatter) as reduction:
            loss_of(model).backward()
        sent = sum(call.args[0].numel() for call in reduction.call_args_list)
        every = sum(unit.layout.padded_numel for unit in model.engine.units)
        say(f"{trained} trained: {sent:,} of {every:,} elements are reduced")


# %% [markdown]
# (The model has 470,528 parameters. The other elements are *marks*: with each gradient go a few
# numbers that tell whether any rank has used the parameter at all; [rows.py](../minifsdp/rows.py)
# explains them.)
#
# ## What it costs
#
# Each parameter is padded with zeros until the ranks can divide its rows evenly. For a matrix with
# many rows that is little or nothing, and for one with few rows it is a lot. This is how many
# elements a parameter has with its padding, on 1, 8 and 64 ranks:


# %%
def padding() -> None:
    print(f"{'shape':12} {'1 rank':>10} {'8 ranks':>10} {'64 ranks':>10}")
    for shape in ((4096, 4096), (4096,), (8, 4096), (1, 4096)):
        numels = [Rows([torch.Size(shape)], [True], ranks).padded_numel for ranks in (1, 8, 64)]
        print(f"{shape!s:12}", *(f"{numel:10,}" for numel in numels))


# %% [markdown]
# A unit in chunks never has more zeros than ranks. There is a cost in time, too. An optimizer has
# one parameter for each unit in chunks, and one for each matrix and vector in rows. And each of
# them is a DTensor, for which PyTorch has more to do in each operation. So a step takes the
# host longer. This is why minifsdp has both, and chunks are the default.
#
# ## What the copy buys
#
# FSDP2 gathers into a buffer and copies each parameter out of it. That copy is good for something.
# Remember why FSDP needs a limiter (page [11](11_limiter.md)): memory that is made on one stream
# and read on another cannot be given out again before the read *has happened*, on a GPU that is far
# behind the host. In FSDP2 the layer does not read what was gathered. It reads the copy, which is
# made on its own stream. Only the copying itself reads the buffer, and it is soon over, so the next
# gather can simply wait for it, as one stream waits for another. FSDP2 has no limiter and does not
# call `record_stream`. Here is the experiment of page 11 again, twenty tensors of 16 MB, both ways:


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
# being made.
#
# ## Predict, then run
#
# 1. You make an optimizer, train a while, and then freeze a matrix. Do you have to make the
#    optimizer again, so that it leaves the matrix alone?
# 2. A temperature is a parameter of one number, of shape `[]`. Which rank has it?
# 3. A thin matrix is `[4, 4096]`. How much of what 8 ranks keep of it is padding?
# 4. Leave out the copy and `record_stream`, and keep every wait where it is. What does the virtual
#    GPU say?
#
# <details><summary>Answers</summary>
#
# 1. No. It has no gradient any more, and an optimizer skips what has none, weight decay included.
# 2. None: it has no rows. minifsdp refuses it by name, and says that a shape of `[1]` would do. (In
#    `grow.12` it counts as one row, as the shape `[1]` does.)
# 3. Half. Each rank has room for one row, and 4 of the 8 ranks have a row of zeros.
# 4. It reports races. The allocator gives the same memory to the next gather, which does not wait
#    for the layer that still reads it: it writes while that computes.
#
# </details>


# %% [hidden]
@on_ranks(2)
def answers() -> None:
    model = WAYS["rows"](gpt())
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.module.head.weight.requires_grad_(False)
    before = weight.full_tensor()
    loss_of(model).backward()
    optimizer.step()
    assert torch.equal(weight.full_tensor(), before)  # 1. no
    TestCase().assertRaises(ValueError, check_divisible, {"t": torch.tensor(1.0)})  # 2. no rows
    assert Rows([torch.Size((4, 4096))], [True], 8).padded_numel == 2 * 4 * 4096  # 3. half of it
    units = model.engine.units
    assert sum(unit.numel for unit in units) == 470_528  # without marks


# %% [hidden]
def main() -> None:
    for experiment in (weight_decay, draw, clip, only_vectors, padding, answers):
        experiment()
    with_and_without_a_copy()
    assert 4 * 4_000_000 == 16e6  # bytes of each of the twenty tensors
    assert twenty_layers(copied=False).races()  # 4. gathers write over what is still being read


if __name__ == "__main__":
    main()

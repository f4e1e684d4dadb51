"""Rows: python tutorials/26_rows.py; the page is 26_rows.md."""

# %% [markdown]
# # Rows: parameters that keep their names
#
# In chunks (page [03](03_shard.md)) a unit is one vector to an optimizer, without names or shapes.
# With `use_orig_params=True` it is divided in *rows*, as by FSDP2 (page [25](25_fsdp2.md)): each
# rank has some rows of every parameter. Both train like DDP, until you want no decay for biases:

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
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm.blocks import by_rank
from minifsdp.reduce import reduce_scatter
from minifsdp.rows import Rows, check_divisible


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


# %%
WAYS = {"DDP": DDP, "chunks": FSDP, "rows": partial(FSDP, use_orig_params=True)}


def train(model: nn.Module, undecayed: str) -> list[torch.Tensor]:
    groups = [{"params": [], "weight_decay": 0.5}, {"params": [], "weight_decay": 0.0}]
    for name, param in model.named_parameters():
        groups[name.endswith(undecayed)]["params"].append(param)
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    torch.manual_seed(dist.get_rank())  # other data on every rank
    for _ in range(5):
        (loss := model(torch.randn(4, 8)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss, *model.state_dict().values()]


@on_ranks(2)
def no_decay() -> None:
    for undecayed in ("nothing", "bias"):
        ddp, *others = [train(wrap(net()), undecayed) for wrap in WAYS.values()]
        equal = (all(map(torch.equal, ddp, other)) for other in others)
        print(f"no decay for {undecayed}; chunks, rows equal to DDP:", *equal)


# %% [markdown]
# Loss and parameters are compared bit by bit. With chunks no name ends in "bias", so biases decay.
# Here is a layer on two ranks, with a weight `[3, 2]` of rows `a`, `b`, `c` and a bias of elements
# `x`, `y`, `z`. What one rank has of one parameter is a *block*:


# %% [hidden]
@on_ranks(2)
def layouts():
    found, colour = [], ("blue", "orange")[dist.get_rank()]
    for name in ("chunks", "rows"):
        layer, full = nn.Linear(2, 3), []
        nn.utils.vector_to_parameters(torch.arange(1.0, 10), layer.parameters())
        unit = (model := WAYS[name](layer)).engine.root
        layer.register_forward_hook(lambda *_, u=unit, f=full: f.extend(u.unsharded.data.int()))
        model(torch.ones(2))
        at = torch.cat(by_rank(torch.arange(len(full)), unit.layout.blocks, 2)[dist.get_rank()])
        assert [full[i] for i in at] == unit.padded_shard.tolist()
        boxes = [(1, colour if n else "gray", "0aabbccxyz"[n]) for n in full]
        found.append([box if i in at else (1, "", "") for i, box in enumerate(boxes)])
    return found


def draw():
    titles, strip = {"chunks: each rank has one block": 6, "rows: each rank has two": 8}, []
    for (title, weight), *ranks in zip(titles.items(), *layouts(), strict=True):
        names = [(weight, "", "weight"), (len(ranks[0]) - weight, "", "bias")]
        strip += [(title, []), ("", names), ("rank 0", ranks[0]), ("rank 1", ranks[1])]
    strips(Path(__file__).with_suffix(".svg"), "one layer on two ranks", strip)


# %% [markdown]
# ![Two groups of two strips. Above, rank 0 has five boxes, and rank 1 the next five. Below, each
# rank has four boxes of the weight and two of the bias, and rank 1's end with zeros.](26_rows.svg)
#
# The one thing to notice: above, row `c` is on both ranks, and below it is on one. Each parameter
# has its own zeros (gray). Without them rank 0 would have 4 + 2 numbers and rank 1 only 2 + 1, so
# the bias would begin at another place. NCCL's collectives need equally many from each rank.
#
# ## The same collectives
#
# The strips show places in the unsharded flat parameter. Layers compute with views of it, so each
# parameter has to be one piece. A rank's shard is its blocks, end to end:
#
# {{ minifsdp/rows.py Rows.shard }}
#
# {{ minifsdp/comm/blocks.py by_rank }}
#
# `blocks` is `[4, 2]` for this layer, and `None` for chunks. Collectives take it as an argument. On
# a CPU they send each block from its place to its place. NCCL needs all blocks of a rank in one
# piece, so on a GPU they are copied, before a reduction and after a gather.
#
# The parameters are `DTensor`s, which know that other ranks have more rows. A norm of one is that
# of all its rows. So torch's clipping, refused on chunks (page [20](20_no_sync.md)), is right here:


# %%
@on_ranks(2)
def clip() -> None:
    for name in ("DDP", "rows"):
        model = WAYS[name](net())
        model(torch.randn(4, 8) + dist.get_rank()).pow(2).mean().backward()
        print(f"{name}: norm {nn.utils.clip_grad_norm_(model.parameters(), 0.1).item():.5f}")


# %% [markdown]
# ## What is frozen is not reduced
#
# In the unsharded flat parameter frozen parameters come last. The trained ones are one piece, and
# nothing else has a gradient. (Chunks refuse that: page 25.) Like LoRA, this trains thin layers:


# %%
@on_ranks(2)
def adapter() -> None:
    for trained in (True, False):
        model = WAYS["rows"](nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64)))
        model.module[0].requires_grad_(trained)
        with mock.patch("minifsdp.reduce.reduce_scatter", wraps=reduce_scatter) as reduction:
            model(torch.randn(2, 64)).sum().backward()
        print(f"reduced: {reduction.call_args.args[0].numel()} of {model.engine.root.padded_numel}")


# %% [markdown]
# ## What it costs
#
# Each parameter is padded to at least one row for each rank. Elements on 1, 8 and 64 ranks:


# %%
def padding() -> None:
    for shape in ((4096, 4096), (4096,), (8, 4096), (1, 4096)):
        numels = [Rows([torch.Size(shape)], [True], ranks).padded_numel for ranks in (1, 8, 64)]
        print(f"{shape!s:12}", *(f"{numel:10,}" for numel in numels))


# %% [markdown]
# A unit in chunks has fewer zeros than ranks. With rows an optimizer has a `DTensor` for each
# parameter, and operations on it run PyTorch's Python code first. So a step takes the host longer.
#
# ## Predict, then run
#
# 1. You freeze a matrix after the optimizer was made. Does it have to be made again?
# 2. A temperature is a parameter of shape `[]`. Which rank has it?


# %%
@on_ranks(2)
def answers() -> None:
    model = WAYS["rows"](net())
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.module[0].weight.requires_grad_(False)
    before = weight.full_tensor()
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    assert torch.equal(weight.full_tensor(), before)  # 1. no
    TestCase().assertRaises(ValueError, check_divisible, {"t": torch.tensor(1.0)})  # 2. no rows


# %% [markdown]
# Next: [27](27_checkpoints.md), how to save what is spread over ranks.


# %% [hidden]
def main() -> None:
    for experiment in (no_decay, draw, clip, adapter, padding, answers):
        experiment()


if __name__ == "__main__":
    main()

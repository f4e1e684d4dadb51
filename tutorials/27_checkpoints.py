"""Checkpoints: python tutorials/27_checkpoints.py; the page is 27_checkpoints.md."""

# %% [markdown]
# # Checkpoints: saved by two ranks, loaded by three
#
# Training takes weeks, and machines fail every day. What each rank could save is its own part. What
# is that? Here is Adam's state for a layer with a weight `[3, 2]` and a bias `[3]`, on two ranks:

# %% [hidden]
import tempfile
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
import torch.distributed.checkpoint as dcp
from draw import strips
from launch import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import as_dtensors, state_to_load, state_to_save

ROWS = partial(FSDP, use_orig_params=True)


def layer():
    torch.manual_seed(0)
    return nn.Linear(2, 3)


# %%
def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    torch.manual_seed(0)  # the same data on any number of ranks, so that losses can be compared
    for _ in range(steps):
        (loss := model(torch.randn(4, 2)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@on_ranks(2)
def show() -> None:
    model = FSDP(layer())
    train(model, optimizer := torch.optim.Adam(model.parameters()), 1)
    for param in model.parameters():
        print("the optimizer has:", {k: list(v.shape) for k, v in optimizer.state[param].items()})
    for name, entry in state_to_save(model, optimizer)["optimizer"]["state"].items():
        for offset, part in entry["exp_avg"].parts.items():
            print(
                f"{name} {list(entry['exp_avg'].shape)}: at {list(offset)} a box {list(part.shape)}"
            )


# %% [markdown]
# The optimizer has five numbers on one rank and four on the other, without a name. Three ranks
# could not use them, nor two with other units, nor a single process. `state_to_save` says what
# they are: *boxes* of parameters, of which each has a name, a shape and a place.
# `torch.distributed.checkpoint` (DCP) saves boxes, each rank its own, and can cut other boxes out
# of them when it loads.
#
# ## A range is a few boxes


# %% [hidden]
@on_ranks(2)
def cut():
    whole = nn.Linear(2, 3)
    nn.utils.vector_to_parameters(torch.arange(1.0, 10), whole.parameters())
    model = FSDP(whole)
    chunk = model.engine.root.sharded_flat_param.int().tolist()
    state = state_to_save(model)["model"].values()
    return chunk, [[part.flatten().int().tolist() for part in t.parts.values()] for t in state]


def draw():
    def cells(numbers, colour):
        return [(1, colour, " aabbccxyz"[n]) for n in numbers]

    strip = [("what each rank has: a chunk", [])]
    for rank, (chunk, _) in enumerate(ranks := cut()):
        strip.append((f"rank {rank}", [(5 * rank, "", ""), *cells(chunk, "blue")]))
    strip.append(("as boxes of the weight (rows a, b, c) and of the bias (x, y, z)", []))
    for rank, (_, params) in enumerate(ranks):
        parts = [(5 * rank, "", "")]
        for number, numbers in enumerate(part for param in params for part in param):
            parts += [(0.5 * bool(number), "", ""), *cells(numbers, "orange")]
        strip.append((f"rank {rank}", parts))
    strips(Path(__file__).with_suffix(".svg"), "from chunks to boxes, for one unit", strip)


# %% [markdown]
# ![Two groups of strips. Rank 0 has the chunk aabbc, and rank 1 cxyz. Below, the same as boxes:
# rank 0 has aabb and c, rank 1 c and xyz.](27_checkpoints.svg)
#
# The cut went through row `c` of the weight, so rank 0 has a box of two whole rows and a box of one
# number. In general these are the rest of a row, whole rows, and the beginning of a row:
#
# {{ minifsdp/between_steps/boxes.py boxes }}
#
# The boxes are views of the chunk. So nothing is sent to another rank and nothing is copied: a
# chunk is written from where it is, and so are Adam's two moments, which are cut in the same way.
#
# ## Saved by two, loaded by three
#
# What is loaded goes into copies, which take effect when the block ends. If a file turns out to be
# damaged, DCP raises an error inside of the block, and the model is what it was before.


# %%
@on_ranks(2)
def two_ranks(folder: str) -> float:
    model = FSDP(layer())
    train(model, optimizer := torch.optim.Adam(model.parameters()), 3)
    dcp.save(state_to_save(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, 2).item()


@on_ranks(3)
def three_ranks(folder: str, way: str) -> float:
    model = {"DDP": DDP, "chunks": FSDP, "rows": ROWS}[way](layer())
    optimizer = torch.optim.Adam(model.parameters())
    with state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=folder)
    return train(model, optimizer, 2).item()


# %%
def two_and_three() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"saved by 2 ranks in chunks; two steps later a loss of {two_ranks(folder)[0]:.6f}")
        for way in ("DDP", "chunks", "rows"):
            print(f"loaded by 3 ranks, {way}; two steps later {three_ranks(folder, way)[0]:.6f}")


# %% [markdown]
# Programs that were written for torch call its own functions, `get_state_dict` and
# `set_state_dict`, which want DTensors, with values to compute with. `as_dtensors` shows them, as
# if the model were in rows (page [26](26_rows.md)). For that ranks do exchange what they have:
# here rank 0 sends a `c`.


# %%
@on_ranks(2)
def as_rows() -> None:
    with as_dtensors(model := FSDP(layer())):
        for name, param in model.named_parameters():
            print(f"{name}: {list(param.shape)}, of which {list(param.to_local().shape)} is here")


# %% [markdown]
# ## Killed at any time
#
# `make demo ARGS="--checkpoint DIR"` saves while it trains: the state is copied, and written during
# the next steps. After a `kill -9` the same command goes on from the newest complete checkpoint, to
# the same bits; under `torchrun --max-restarts` without hands. A checkpoint is complete if its list
# of contents, `.metadata`, is there, which is written last. [checkpoints.py](checkpoints.py) does
# this, and saves what one forgets: schedule, random states, and each rank's place in its data.
#
# A checkpoint of others may be a program: DCP reads `.metadata` with `pickle`, which calls what the
# file names. checkpoints.py has a reader that knows a dozen names and calls nothing else.
#
# ## Predict, then run
#
# 1. In the checkpoint biases have another weight decay than weights. Can chunks load it?
# 2. Is what was saved still right after the next step, or are these the optimizer's own tensors?


# %%
@on_ranks(2)
def answers() -> None:
    rows, chunks = ROWS(layer()), FSDP(layer())
    groups = [{"params": [p], "weight_decay": p.dim() / 10} for p in rows.parameters()]
    state = FSDP.optim_state_dict(rows, torch.optim.AdamW(groups))
    try:
        FSDP.optim_state_dict_to_load(chunks, torch.optim.AdamW(chunks.parameters()), state)
    except ValueError as error:  # 1. no: one flat parameter has one weight decay
        print(str(error).partition(" in the state")[0])
    optimizer = torch.optim.AdamW(chunks.parameters(), lr=0.1)
    train(chunks, optimizer, 1)
    saved = FSDP.optim_state_dict(chunks, optimizer)["state"]["weight"]["exp_avg"]
    before = saved.clone()
    train(chunks, optimizer, 1)
    assert torch.equal(saved, before)  # 2. it is a copy


# %% [markdown]
# That is all. The [README](../README.md) has the source in order; `make test` says what you break.


# %% [hidden]
def main() -> None:
    for experiment in (show, draw, two_and_three, as_rows, answers):
        experiment()


if __name__ == "__main__":
    main()

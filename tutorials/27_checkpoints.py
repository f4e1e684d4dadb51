"""Checkpoints: python tutorials/27_checkpoints.py; the page is 27_checkpoints.md."""

# %% [markdown]
# # Checkpoints: saved by two ranks, loaded by three
#
# Training takes weeks, and machines fail every day. What each rank could save is its own part. What
# is that? Here is Adam's state for a layer with a weight `[3, 2]` and a bias `[3]`, on two ranks:

# %% [hidden]
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")

import torch
import torch.distributed.checkpoint as dcp
from draw import strips
from launch import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import as_dtensors

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
    for block in (nullcontext(), as_dtensors(model, optimizer, writeback=False)):
        with block:
            for name, param in model.named_parameters():
                moment = optimizer.state[param]["exp_avg"]
                local = getattr(moment, "_local_tensor", moment)  # of a DTensor: this rank's rows
                print(f"{name}: {list(moment.shape)}, of which {list(local.shape)} is here")


# %% [markdown]
# Outside of the block: five numbers and four, without a name. Three ranks could not use them, nor
# two with other units, nor a single process. Inside, `as_dtensors` shows the model as if it were in
# rows (page [26](26_rows.md)). Each tensor has a name, a shape and a place, so
# `torch.distributed.checkpoint` (DCP) can save it, each rank its own rows, and load any rows again.
#
# ## From chunks to rows, and back


# %% [hidden]
@on_ranks(2)
def conversion():
    whole = nn.Linear(2, 3)
    nn.utils.vector_to_parameters(torch.arange(1.0, 10), whole.parameters())
    model = FSDP(whole)
    chunk = model.engine.root.sharded_flat_param.int().tolist()
    with as_dtensors(model, writeback=False):
        return chunk, [p.to_local().flatten().int().tolist() for p in model.parameters()]


def draw():
    def boxes(numbers, colour):
        return [(1, colour, " aabbccxyz"[n]) for n in numbers]

    strip = [("what each rank has: a chunk", [])]
    for rank, (chunk, _) in enumerate(ranks := conversion()):
        strip.append((f"rank {rank}", [(5 * rank, "", ""), *boxes(chunk, "blue")]))
    strip.append(("what it gets: its rows of each parameter", []))
    for rank, (_, (weight, bias)) in enumerate(ranks):
        parts = [(4 * rank, "", ""), *boxes(weight, "orange"), (2, "", ""), *boxes(bias, "orange")]
        strip.append((f"rank {rank}", parts))
    strips(Path(__file__).with_suffix(".svg"), "from chunks to rows, for one unit", strip)


# %% [markdown]
# ![Two groups of strips. Rank 0 has the chunk aabbc, and rank 1 cxyz. Then rank 0 has the rows aabb
# and xy, and rank 1 cc and z.](27_checkpoints.svg)
#
# Rank 0 sends one `c` and gets `x` and `y`. Nobody holds the whole unit, as a gather would need. So
# it goes with each unit, and with each of Adam's two moments. The way back is the same:
#
# {{ minifsdp/between_steps/unit_dtensors.py dtensors_to_chunk }}
#
# ## Saved by two, loaded by three
#
# Inside of the block all of torch's functions for checkpoints are right. With DDP it does nothing:


# %%
def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@on_ranks(2)
def two_ranks(folder: str) -> float:
    model = FSDP(layer())
    train(model, optimizer := torch.optim.Adam(model.parameters()), 3)
    with as_dtensors(model, optimizer, writeback=False):
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return train(model, optimizer, 2).item()


@on_ranks(3)
def three_ranks(folder: str, way: str) -> float:
    model = {"DDP": DDP, "chunks": FSDP, "rows": ROWS}[way](layer())
    optimizer = torch.optim.Adam(model.parameters())
    with as_dtensors(model, optimizer):
        dcp.load(state := state_of(model, optimizer), checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return train(model, optimizer, 2).item()


# %%
def two_and_three() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(f"saved by 2 ranks in chunks; two steps later a loss of {two_ranks(folder)[0]:.6f}")
        for way in ("DDP", "chunks", "rows"):
            print(f"loaded by 3 ranks, {way}; two steps later {three_ranks(folder, way)[0]:.6f}")


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
    for experiment in (show, draw, two_and_three, answers):
        experiment()


if __name__ == "__main__":
    main()

"""Checkpoints: python tutorials/27_checkpoints.py; the page is 27_checkpoints.md."""

# %% [markdown]
# # Checkpoints: saved by two ranks, loaded by three
#
# A long training has to survive the failure of a machine. So from time to time it saves its state,
# a *checkpoint*, from which it can go on. With a whole model that is one call of `torch.save`. Here
# each rank has only a part. May every rank simply save its own part to a file of its own?
#
# Let us try it with the GPT of `make demo`, with two blocks. Two ranks train it and write a file
# each. Then they are started again and read the files, once as they were and once with the numbers
# of the two ranks exchanged. That happens: torchrun's documentation says in capitals that [`RANK`
# is NOT stable](https://docs.pytorch.org/docs/stable/elastic/run.html) from one start to the next.
# What do you expect of the loss?

# %% [hidden]
import tempfile
import warnings
from pathlib import Path
from unittest import TestCase

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import Checkpoints
from draw import strips
from launch import on_ranks
from taken_out import call, three_times
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy, state_to_load, state_to_save


def gpt(way="in chunks", seed=0):
    torch.manual_seed(seed)
    model = GPT(layers=2, width=128)
    settings = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": way == "in rows"}
    model = DDP(model) if way == "under DDP" else FSDP(model, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)


def train(model, optimizer, steps):
    torch.manual_seed(0)  # the same data on any number of ranks, so that losses can be compared
    for _ in range(steps):
        letters = (torch.randint(26, (2, 1)) + torch.arange(32)) % 26
        loss = cross_entropy(model(letters).flatten(0, 1), (letters.flatten() + 1) % 26)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# %%
@on_ranks(2)
def a_file_for_each_rank(folder: str) -> list[float]:
    model, optimizer = gpt()
    train(model, optimizer, 20)
    torch.save(nn.utils.parameters_to_vector(model.parameters()), f"{folder}/{dist.get_rank()}")
    dist.barrier()
    losses = []
    for restarted_as in (dist.get_rank(), 1 - dist.get_rank()):
        model, optimizer = gpt(seed=1)
        nn.utils.vector_to_parameters(torch.load(f"{folder}/{restarted_as}"), model.parameters())
        losses.append(train(model, optimizer, 1))
    print(f"loss after loading: {losses[0]:.2f}, with ranks 0 and 1 exchanged: {losses[1]:.2f}")
    return losses


# %% [markdown]
# ## What breaks without names
#
# After the exchange the loss is 5.55, and there was no error. That is the logarithm of 256, the
# loss of a model that knows nothing of its 256 tokens. The first half of each unit and the second
# half have changed places. They have the same shape, a vector without a name, so nothing could
# notice. Three ranks could not have loaded these files at all, nor could two ranks with different
# units, nor a program that wants the whole model.
#
# So a part has to say what it is a part of. This is what each rank has of the state of a linear
# layer after a step with Adam, first as the optimizer sees it, and then as
# `minifsdp.state_to_save` describes it:


# %%
@on_ranks(2)
def one_layer() -> None:
    layer = FSDP(nn.Linear(2, 3))
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for param in layer.parameters():
        print("the optimizer has", {k: list(v.shape) for k, v in optimizer.state[param].items()})
    for name, entry in state_to_save(layer, optimizer)["optimizer"]["state"].items():
        average = entry["exp_avg"]
        for offset, part in average.parts.items():
            print(f"exp_avg of {name} {list(average.shape)}: at {list(offset)} {list(part.shape)}")


# %% [markdown]
# The weight is `[3, 2]` and the bias `[3]`, so there are 9 numbers, and the chunks have 5 and 4.
# `state_to_save` divides each chunk into *boxes*. A box is a rectangular piece of one parameter. It
# has the parameter's name and whole shape, and the place at which it begins. `at [2, 0] [1, 1]` is
# one number, the first one of the last row. PyTorch's library for such files,
# `torch.distributed.checkpoint` (*DCP*), works with boxes as well: each rank writes its own, and a
# rank that loads may ask for other boxes, which are put together from those in the files.
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
    def cells(numbers, colours):
        return [(1, colours[n > 6], " aabbccxyz"[n]) for n in numbers]

    strip = [("what each rank has: a chunk, cut without a look at rows and parameters", [])]
    for rank, (chunk, _) in enumerate(ranks := cut()):
        strip.append((f"rank {rank}", [(5 * rank, "", ""), *cells(chunk, ("blue", "orange"))]))
    strip.append(("what it saves: boxes of the weight and of the bias", []))
    for rank, (_, params) in enumerate(ranks):
        parts = [(5.5 * rank, "", "")]
        for number, numbers in enumerate(part for param in params for part in param):
            parts += [(0.5 * bool(number), "", ""), *cells(numbers, ("blue", "orange"))]
        strip.append((f"rank {rank}", parts))
    legend = {"blue": "weight, rows a, b, c of two elements", "orange": "bias, x, y, z"}
    strips(Path(__file__).with_suffix(".svg"), "One linear layer on two ranks", strip, legend)


# %% [markdown]
# ![Two groups of two strips. As chunks rank 0 has a, a, b, b, c, and rank 1 has c, x, y, z. As
# boxes rank 0 has a box of a, a, b, b and one of c, and rank 1 has a box of c and one of x, y,
# z.](27_checkpoints.svg)
#
# The cut went through row `c`. So rank 0 has a box of two whole rows, and a box of one number. In
# general, a range of elements of a matrix is the end of a row, some whole rows, and the beginning
# of a row:
#
# {{ minifsdp/chunks/boxes.py boxes -Divide elements -if not shape }}
#
# (`_inside` makes the boxes of a part of one row, by calling `boxes` with one dimension less. For a
# matrix that is one box, and for a tensor of more dimensions there may be several.) A box is a
# *view* of the chunk. So to save in chunks, nothing is sent to another rank and nothing is copied:
# everything is written from where it is, and so are Adam's two averages, which are cut in the same
# way.
#
# ## Saved by two, loaded by three
#
# Two ranks train the GPT in chunks, save, and train two steps more. Then three ranks load what was
# saved, into a model with different random numbers, under DDP, in chunks and in rows. They train
# the same two steps:


# %%
@on_ranks(2)
def two_ranks(folder: str) -> float:
    model, optimizer = gpt()
    train(model, optimizer, 20)
    dcp.save(state_to_save(model, optimizer, checksums=True), checkpoint_id=folder)
    return train(model, optimizer, 2)


@on_ranks(3)
def three_ranks(folder: str, way: str) -> float:
    model, optimizer = gpt(way, seed=1)
    with state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=folder)
    return train(model, optimizer, 2)


def two_and_three(folder: str) -> None:
    print(f"saved by 2 ranks in chunks; two steps later the loss is {two_ranks(folder)[0]:.2f}")
    for way in ("under DDP", "in chunks", "in rows"):
        print(f"loaded by 3 ranks {way}; two steps later {three_ranks(folder, way)[0]:.2f}")


# %% [markdown]
# `state_to_load` gives the same boxes, as copies to be filled. At the end of the `with` block they
# are written to the model and the optimizer. If DCP cannot read a file, it raises an error inside
# of the block, and model and optimizer are what they were before.
#
# ## Taken out: the comparison of checksums
#
# DCP notices a file that ends too early, but not bytes that have changed on a disk: it loads wrong
# numbers. That is why the two ranks saved with `checksums=True`, which adds a checksum of each
# tensor. `state_to_load` finds it in the checkpoint, computes it again from what was loaded, and
# compares, before anything takes effect ([checksums.py](../minifsdp/between_steps/checksums.py)).
# The checksum is a sum over all elements, each times a number that belongs to its place in the
# whole tensor. So each rank adds up its own boxes, and three ranks get the same sum as two.
#
# Checkpoints are not a layer. They are functions between two steps, and the comparison is one of
# them. Suppose that a disk has lost 512 bytes of a file, and gives zeros in their place. Three
# ranks load the file as it is, without the comparison, and with it (by `three_times`, in
# [taken_out.py](taken_out.py)):


# %%
@on_ranks(3)
def without_the_comparison(folder: str) -> None:
    check = call("minifsdp.between_steps.checkpoint_state.check")
    three_times(lambda: f"loaded; later a loss of {three_ranks.body(folder, 'in rows'):.2f}", check)


# %% [markdown]
# With it nothing is loaded. Without it the training goes on, and its loss is the same to two
# digits.
#
# ## With PyTorch's own functions
#
# Programs that were written for PyTorch's own FSDP call its functions `get_state_dict` and
# `set_state_dict` instead. These want DTensors with values that one can compute with, and a box is
# no such thing. Inside of `with minifsdp.as_dtensors(model, optimizer):` the model looks as if it
# were in rows (page [26](26_rows.md)). This takes messages, because ranks have to exchange what
# they have until each has whole rows: in the picture rank 0 would send its `c` to rank 1.
#
# ## Killed at any time
#
# A process may also be killed while it writes a checkpoint. Then some files are there and some are
# not, and the program that goes on must not take them for a checkpoint. DCP writes a list of all
# that a checkpoint contains, `.metadata`, and it writes that last. So a checkpoint is complete if
# this file is there. [checkpoints.py](checkpoints.py) makes use of that. It saves while the next
# steps run (`dcp.async_save` copies the state and writes in the background), keeps the two newest
# complete checkpoints, and goes on from the newest one. Here the process is "killed" while it
# writes the checkpoint of step 4:


# %%
@on_ranks(2)
def killed(folder: str) -> None:
    model, optimizer = gpt()
    own = {"steps": torch.zeros(1)}  # what only this rank has
    about = Path(folder), model, optimizer, LinearLR(optimizer), {"layers": 2}
    checkpoints, losses = Checkpoints(*about), []
    for step in range(1, 5):
        losses.append(train(model, optimizer, 1))
        own["steps"] += 1
        if step % 2 == 0:
            checkpoints.save(step, own)
    checkpoints.close()
    Path(folder, "step-000004", ".metadata").unlink(missing_ok=True)  # not yet written, as it were
    done = Checkpoints(*about).resume(own)
    again = [train(model, optimizer, 1) for _ in range(done, 4)]
    print(f"it goes on after step {done}, as its own count says, {own['steps'].item():.0f}")
    print("the same losses as before, in every bit:", again == losses[done:])


# %% [markdown]
# The optimizer's averages have to be saved with the parameters, and so has all else that the next
# step depends on: the schedule of the learning rate, the states of random number generators, and
# each rank's place in its data. The last two differ from rank to rank. `own` is for these.
# `make demo ARGS="--checkpoint DIR"` does all of that. You may stop it with `kill -9` and give the
# same command again. It ends with the same bits as a run that was never stopped.
#
# One warning. The `.metadata` of DCP is read with Python's `pickle`, and a pickle may call any
# function that it names. So to load a checkpoint from strangers is to run their program.
# checkpoints.py reads it with a reader that knows a dozen names and refuses all others.
#
# ## Predict, then run
#
# 1. You call `state = state_to_save(model)`, train one step, and only then `dcp.save(state)`. Is
#    the model in the checkpoint the one from before the step?
# 2. The GPT has 470,528 parameters. How many numbers does each of two ranks write, with AdamW?
# 3. Somebody has trained in rows, with less weight decay for biases. Can you go on in chunks?
#
# <details><summary>Answers</summary>
#
# 1. No, it is the one from after it. Boxes are views, and what they show changes with the model.
#    (After `dcp.save` or `dcp.async_save` has returned you may train on: it is written, or copied.)
# 2. 705,792: half of the parameters, and half of two averages for each. (And a few that count
#    steps.)
# 3. No. One flat parameter has one weight decay. `FSDP.optim_state_dict_to_load` says so, names two
#    parameters, and changes nothing.
#
# </details>


# %% [hidden]
@on_ranks(2)
def answers() -> None:
    model, optimizer = gpt()
    train(model, optimizer, 1)
    state = state_to_save(model, optimizer)
    box = next(part for tensor in state["model"].values() for part in tensor.parts.values())
    before = box.clone()
    train(model, optimizer, 1)
    assert not torch.equal(before, box)  # 1. what is to be saved has changed
    averages = [(e["exp_avg"], e["exp_avg_sq"]) for e in state["optimizer"]["state"].values()]
    saved = [*state["model"].values(), *sum(averages, ())]
    numel = sum(part.numel() for tensor in saved for part in tensor.parts.values())
    assert numel == 705_792 == 3 * 470_528 // 2  # 2. half of three of each
    rows, _ = gpt("in rows")
    groups = [{"params": [p], "weight_decay": p.dim() / 10} for p in rows.parameters()]
    state = FSDP.optim_state_dict(rows, torch.optim.AdamW(groups))
    with TestCase().assertRaisesRegex(ValueError, "in one parameter group"):  # 3. of each chunk
        FSDP.optim_state_dict_to_load(model, optimizer, state)


# %% [markdown]
# You have read about most of the source now, and the [README](../README.md) has a map of it. Change
# something, and let `make test` tell you what you broke.


# %% [hidden]
def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        right, wrong = a_file_for_each_rank(folder)[0]
        assert right < 2 and abs(wrong - torch.tensor(256.0).log()) < 0.01  # one that knows nothing
        one_layer()
        draw()
        two_and_three(f"{folder}/two")
        file = next(Path(folder, "two").glob("*_0_*.distcp"))
        file.write_bytes((saved := file.read_bytes())[:200_000] + bytes(512) + saved[200_512:])
        without_the_comparison(f"{folder}/two")
        killed(f"{folder}/killed")
        answers()


if __name__ == "__main__":
    main()

"""FSDP in one file: python tutorials/06_one_file.py; the page is 06_one_file.md."""

# %% [markdown]
# # FSDP in one file
#
# You have seen the parts: a flat tensor ([02](02_flatten.md)), its shards ([03](03_shard.md)),
# memory that comes and goes ([04](04_unshard.md)), and five moments of a training step
# ([05](05_hooks.md)). How much code is it to put them together, so that a GPT trains on two ranks
# and gets the very numbers that DistributedDataParallel gets?
#
# It is [fsdp_in_one_file.py](fsdp_in_one_file.py): 106 lines, comments included, of plain PyTorch.
# Open it beside this page. It is not part of minifsdp and imports nothing from it. To use it you
# write one line, and then an ordinary training loop:
#
# ```python
# model = GPT(layers=4, width=128)
# engine = fsdp(model, Block)  # the new line
# optimizer = torch.optim.AdamW(model.parameters())  # gets what this rank keeps
# ```
#
# ## From a model to units
#
# A *unit* is a set of parameters that are gathered together and freed together. Here each block of
# the GPT becomes one. What is in no block (the embeddings, the last norm, the head) becomes one
# more, the *root's*. So every parameter belongs to the innermost unit around it:
#
# {{ tutorials/fsdp_in_one_file.py fsdp }}
#
# Each unit is flattened and sharded once, when it is made. Then its modules lose their parameters,
# and the unit's module gets one new parameter, the shard. That is why the optimizer needs no
# change: `model.parameters()` lists five shards and nothing else.
#
# {{ tutorials/fsdp_in_one_file.py Unit.__init__ }}
#
# ## Unshard and reshard
#
# `flat_param` is the tensor from page 04: its shape stays, and its storage is resized. To fill it
# with what all ranks have is to *unshard* the unit; to free it is to *reshard* it.
#
# {{ tutorials/fsdp_in_one_file.py Unit.unshard }}
#
# {{ tutorials/fsdp_in_one_file.py Unit.reshard }}
#
# The layers compute with views of it, in the shapes of the parameters, as on page 02. They are put
# where the modules look for their parameters, and taken away again:
#
# {{ tutorials/fsdp_in_one_file.py Unit.unflatten }}
#
# {{ tutorials/fsdp_in_one_file.py Unit.show_views }}
#
# {{ tutorials/fsdp_in_one_file.py Unit.hide_views }}
#
# ## The four moments
#
# Page 05 has five moments. The fifth, the end of the backward, is when FSDP waits for reductions
# that are still under way. Here every reduction is waited for where it is made, so nothing is left
# to do at the end. What happens to a unit at each of the other four is a method of `Engine`, which
# hands them to PyTorch as hooks:
#
# {{ tutorials/fsdp_in_one_file.py Engine.__init__ }}
#
# Before and after the forward, modules get the views and lose them again:
#
# {{ tutorials/fsdp_in_one_file.py Engine.before_forward }}
#
# {{ tutorials/fsdp_in_one_file.py Engine.after_forward }}
#
# In the backward, the parameters come back when the first gradient arrives at the unit's output.
# They are freed, and the gradient is reduced, when `flat_param.grad` is complete:
#
# {{ tutorials/fsdp_in_one_file.py Engine.before_backward }}
#
# {{ tutorials/fsdp_in_one_file.py Engine.after_gradient }}
#
# That is all. Does it train? Here is the GPT of `make demo`, on two ranks with different data, with
# AdamW, first sharded and then under DDP. (`train` is an ordinary loop; it and the helpers are in
# [the program](06_one_file.py).)

# %% [hidden]
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import fsdp_in_one_file
import torch
import torch.distributed as dist
import torch.nn.functional as F
from draw import bars
from launch import on_ranks
from one_file import FILE, changed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from train_gpt import BATCH, CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy

PICTURE = Path(__file__).with_suffix(".svg")
TEXT = torch.frombuffer(bytearray(FILE.read_bytes()), dtype=torch.uint8).long()


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=4, width=128)
    if tied:
        model.head.weight = model.token.weight
    return model


def train(model: nn.Module, steps: int = 4) -> tuple[list[float], dict[str, int]]:
    """This rank's losses, and how many bytes of each kind there are before the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = torch.Generator().manual_seed(dist.get_rank())
    losses, kept = [], {}
    for _ in range(steps):
        at = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,), generator=sampler)
        rows = torch.stack([TEXT[i : i + CONTEXT + 1] for i in at.tolist()])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        params = list(model.parameters())
        kept = {"parameters": sum(p.untyped_storage().nbytes() for p in params)}
        kept["gradients"] = sum(p.grad.nbytes for p in params)
        optimizer.step()
        optimizer.zero_grad()
        states = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
        kept["Adam's averages"] = sum(state.nbytes for state in states)
        losses.append(loss.item())
    return losses, kept


def watch(file: ModuleType, units: list[Any]) -> list[int]:
    """Note at each gather how many bytes of whole parameters have memory."""
    noted, unshard = [], file.Unit.unshard

    def noting(unit: Any) -> None:
        unshard(unit)
        noted.append(sum(other.flat_param.untyped_storage().nbytes() for other in units))

    file.Unit.unshard = noting
    return noted


# %%
@on_ranks(2)
def against_ddp() -> None:
    model, reference = gpt(), gpt()
    engine = fsdp_in_one_file.fsdp(model, Block)
    losses, _ = train(model, steps=20)
    expected, _ = train(DDP(reference), steps=20)
    found = engine.full_params()
    same = [torch.equal(found[name], param) for name, param in reference.named_parameters()]
    equal = sum(a == b for a, b in zip(losses, expected, strict=True))
    print(f"loss {losses[0]:.1f} to {losses[-1]:.1f}; {equal} of 20 losses are bit-equal to DDP's,")
    print(f"and so are {sum(same)} of {len(same)} parameters after 20 steps")
    assert equal == 20 and all(same) and len(same) == len(found)


# %% [markdown]
# Bit-equal means equal in all 32 bits of each number. There is no tolerance that could hide a small
# mistake. It holds for two ranks, where a mean has two terms and `a + b` is `b + a`. With three,
# `(a + b) + c` and `a + (b + c)` round differently, and the two methods add in different orders.
#
# ## What it is good for
#
# The same run again, and the bytes that a rank needs for the model:

# %% [hidden]
SHOWN = ("parameters", "gradients", "Adam's averages", "gathered at most")


def memory(sharded: bool) -> dict[str, int]:
    model = gpt()
    if not sharded:
        return train(DDP(model))[1]
    engine = fsdp_in_one_file.fsdp(model, Block)
    noted = watch(fsdp_in_one_file, engine.units)
    return train(model)[1] | {"gathered at most": max(noted)}


@on_ranks(2)
def on_two(sharded: bool) -> dict[str, int]:
    return memory(sharded)


@on_ranks(4)
def on_four(sharded: bool) -> dict[str, int]:
    return memory(sharded)


# %%
def bytes_of_a_rank() -> None:
    rows = {"DDP, any number of ranks": on_two(False)[0]}
    rows |= {"one file, 2 ranks": on_two(True)[0], "one file, 4 ranks": on_four(True)[0]}
    for name, kinds in rows.items():
        print(f"{name:25}", *(f"{kind} {n / 1e6:.2f} MB;" for kind, n in kinds.items()))
    draw(rows)


# %% [hidden]
def draw(rows: dict[str, dict[str, int]]) -> None:
    ordered = {name: {kind: row.get(kind, 0) for kind in SHOWN} for name, row in rows.items()}
    bars(PICTURE, "Memory of one rank for the model, in MB", ordered,
         lambda n: f"{n / 1e6:.2f} MB")  # fmt: skip
    totals = [sum(row.values()) / 1e6 for row in rows.values()]
    assert [f"{total:.1f}" for total in totals] == ["13.9", "8.0", "4.6"], totals


# %% [markdown]
# ![Three bars of memory. DDP needs 13.9 MB: parameters, gradients, and Adam's averages, which are
# half of it. One file on 2 ranks needs 8.0 MB: half of each of these, and 1.1 MB for what is
# gathered. On 4 ranks it needs 4.6 MB, and 1.1 MB for what is gathered.](06_one_file.svg)
#
# What a rank keeps is divided by the number of ranks. What is gathered is not: it is the root and
# one block, however many ranks there are. (For a moment there is also the whole gradient of one
# unit. Activations, what a forward keeps for its backward, are not in the chart. FSDP leaves them
# as they are; page 15 is about them.)
#
# ## What breaks without each line
#
# A file this short invites you to leave something out. Here one line at a time is changed, and the
# GPT is trained again. Before you read on: which of these changes does the loss show?

# %% [hidden]
ONCE = "zip(self.__dict__.setdefault('made', [*self.unflatten(self.flat_param)]),"
CHANGES: dict[str, dict[str, str]] = {
    "nothing is changed": {},
    "reshard() does nothing": {"untyped_storage().resize_(0)": "untyped_storage()"},
    "the shard is a view, not a copy": {"[rank].clone()": "[rank]"},
    "views are made once": {"zip(self.unflatten(self.flat_param),": ONCE},
    "gradients are added, not averaged": {"grad / unit.world": "grad"},
    "gather writes to flat_param, not its .data": {
        "all_gather(self.flat_param.data": "all_gather(self.flat_param"
    },
}


# %%
@on_ranks(2)
def one_line_changed() -> dict[str, str]:
    expected, table = train(DDP(gpt()))[0], {}
    for change, lines in CHANGES.items():
        file = changed(lines) if lines else fsdp_in_one_file
        model = gpt()
        gathered = watch(file, file.fsdp(model, Block).units)
        try:
            losses, kept = train(model)
        except RuntimeError as error:
            table[change] = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
            continue
        same = "DDP's losses" if losses == expected else "other losses"
        keeps, most = kept["parameters"] / 1e6, max(gathered) / 1e6
        table[change] = (
            f"{same}, last {losses[-1]:.2f}; keeps {keeps:.2f} MB, gathers {most:.2f} MB"
        )
    return table


def what_breaks() -> None:
    for change, outcome in one_line_changed()[0].items():
        print(f"{change:42}  {outcome}")


# %% [hidden]
@on_ranks(2)
def tied(kinds: str) -> tuple[bool, int, int]:
    """Does a GPT whose head is its embedding train as DDP? Gathers in a step; minifsdp's."""
    expected, model = train(DDP(gpt(tied=True)))[0], gpt(tied=True)
    sharded = fsdp_in_one_file.fsdp(model, Block, *([nn.Embedding] if kinds else []))
    noted = watch(fsdp_in_one_file, sharded.units)
    losses, _ = train(model)
    engine = FSDP(gpt(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    train(engine, steps=1)
    return losses == expected, len(noted) // 4, engine.engine.stats.all_gathers


# %% [markdown]
# Only one of the five changes gives different losses, and you would not see it either: Adam divides
# by the size of the gradient, so a gradient that is twice too large makes nearly the same step.
# Three give DDP's losses in every bit, and quietly take the memory that sharding was to save. (When
# views are made once, their backward comes last, so no unit is freed before all are there: page
# 05.) One is refused by autograd, which is the best that can happen. So a falling loss proves
# little. To know that such a file is right, compare bits and count bytes; page [24](24_parity.md)
# shows how.
#
# ## Predict, then run
#
# 1. How often are units gathered in one step of this GPT?
# 2. In many language models the head's weight is the embedding's: one parameter that has two
#    owners. Does such a GPT train as under DDP?
# 3. And if each embedding is a unit of its own, `fsdp(model, Block, nn.Embedding)`?
#
# <details><summary>Answers</summary>
#
# 1. Ten times: five units, each once in the forward and once in the backward. minifsdp needs nine.
#    It does not free the root after the forward, because the backward begins with it.
# 2. Yes, bit for bit. Both owners get the same view, and autograd adds up its two gradients.
# 3. No, and nothing complains. The head's weight stays with the root, and the embedding's unit has
#    a copy of it. Each gets a part of the gradient, and after one step they differ. The losses
#    differ from DDP's. minifsdp refuses this.
#
# </details>


# %% [hidden]
def answers() -> None:
    as_ddp, *gathers = tied("")[0]
    assert gathers == [10, 9]  # 1. ten, and minifsdp's nine
    assert as_ddp is True  # 2. the same losses
    assert tied("embedding")[0][0] is False  # 3. other losses


# %% [markdown]
# ## What is missing, line by line
#
# It works, and it is slow: while it gathers, nothing is computed. It also trusts you. (What if
# ranks start with different values? If one runs out of data? If an exception ends a backward?)
# Here is what each line is too simple for, and the page that makes it better:
#
# <details><summary>The lines. To write the file yourself first: build.1 to build.8</summary>
#
# {{ one_file table }}
#
# </details>
#
# The file itself grows, too: eighteen [steps](29_steps.md) of about 25 lines each, at the end of
# the pages that they belong to, turn it into an FSDP that does all this and is as fast as
# minifsdp's.
#
# What a step costs, in bytes and in seconds, fits on [a sheet of formulas](30_formulas.md).


# %% [hidden]
def main() -> None:
    code = FILE.read_text().split('"""', 2)[2]  # below what it says of itself
    assert len([line for line in code.splitlines() if line.strip()]) == 106
    assert torch.finfo(torch.float32).bits == 32
    against_ddp()
    bytes_of_a_rank()
    what_breaks()
    answers()


if __name__ == "__main__":
    main()

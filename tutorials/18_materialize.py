"""Materialize: python tutorials/18_materialize.py; the page is 18_materialize.md."""

# %% [markdown]
# # Materialize: a model that never exists whole
#
# So far there was a model, and FSDP cut it up. But where was it before? A GPT of 7 billion
# parameters takes 27 GB in fp32. A machine with eight GPUs runs eight processes, and each of them
# builds the whole model in the host's memory, draws random numbers for all of it, and keeps an
# eighth. Could a process do without the rest?
#
# PyTorch can build a model without memory. On the *meta* device a tensor has a shape and a dtype,
# but no values. Operations on it only find out which shape the result has:

# %% [hidden]
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from cut_memory import fullest
from draw import bars
from launch import on_ranks
from taken_out import call, three_times
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_gpt import CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.sim.training.presets import MODELS

BLOCKS, MiB = ModuleWrapPolicy({Block}), 2**20
DEMO = {"layers": 4, "width": 128}


def loss_of(model: nn.Module) -> float:
    """Of random tokens, the same ones each time."""
    tokens = torch.randint(256, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()


# %%
def seven_billion() -> None:
    with torch.device("meta"):
        model = MODELS["gpt-7b"].build()
        answer = model(torch.zeros(1, 8, dtype=torch.long))
    params = list(model.parameters())
    size, addresses = sum(param.nbytes for param in params), {param.data_ptr() for param in params}
    print(f"{size / 1e9:.1f} GB of parameters, at the addresses {addresses}")
    print(f"a forward of 8 tokens gives a tensor of shape {list(answer.shape)}")


# %% [markdown]
# So each rank builds the model on meta, and gives it to `FSDP`. When FSDP makes a unit, it
# *materializes* it: the parameters of the unit get memory and values. Then the unit is cut, the
# shard is kept, and the rest is freed, before the next unit gets anything. Only one unit at a time
# is whole. This is the heart of it:
#
# {{ minifsdp/wrapping/materialize.py materialize -Give memory -shared: Shared
# -for attribute in _on_meta -if device.type -_tie( -for name in _on_meta }}
#
# (`modules` are those of a unit. `_hidden_units` hides the units inside, which have their values
# already.) And this gives values, unless the user asks for something else:
#
# {{ minifsdp/wrapping/materialize.py _reset -Memory for all }}
#
# `reset_parameters()` is a method of most of PyTorch's modules that have parameters. They call it
# when they are built, to draw their random values. So it can be called again when there is memory.
# A module without it is refused by name, and the user is told what to do.
#
# Here is the GPT of `make demo` on four ranks, built by each of them, and built on meta. `most` is
# what a rank has in memory at the worst moment. (`fullest`, in [cut_memory.py](cut_memory.py),
# looks at each cut.)


# %%
@on_ranks(4)
def two_ways() -> list[dict[str, float]]:
    most = []
    for device in (torch.get_default_device(), torch.device("meta")):
        with fullest() as parts:
            with device:
                gpt = GPT(**DEMO)
            _model = FSDP(gpt, auto_wrap_policy=BLOCKS)
        most.append(parts)
        del gpt, _model
    return most


# %% [hidden]
def draw() -> None:
    (built, meta), *_ = two_ways()
    rows = {"each rank builds the model": built, "the model is on meta": meta}
    rows = {name: {k: v / MiB for k, v in parts.items()} for name, parts in rows.items()}
    title = "memory of each of four ranks, at most, while FSDP wraps a model of 3.3 MiB"
    bars(Path(__file__).with_suffix(".svg"), title, rows, "{:.1f} MiB".format)
    found = [[round(v, 1) for v in parts.values()] for parts in rows.values()]
    assert found == [[0.2, 3.3, 0.8], [0.8, 0.8, 0.8]], found  # as the picture's text says


# %% [markdown]
# ![Two bars of memory. Each rank builds the model: 0.2 MiB of shards, 3.3 of modules, 0.8 of a flat
# tensor, 4.3 together. On meta: 0.8, 0.8 and 0.8, 2.3 together.](18_materialize.svg)
#
# If a rank builds the model, the worst moment is the first cut: all modules are there, and one unit
# a second time, in its flat tensor. If the model is on meta, the worst moment is one of the last
# cuts: all shards, and one unit twice. The shards stay. For this small model the unit is a large
# part. For the one with 7 billion parameters on eight ranks it is 1.6 GB, twice a block, beside 3.3
# GB of shards. These are five GB. If a rank built the model, they would be 28.
#
# ## Which values?
#
# The demo's GPT draws its matrices with a standard deviation of 0.02. It does so in its own
# `__init__`, after the modules have drawn theirs. What do they have after they were on meta?


# %%
def own_values(module: nn.Module, recurse: bool = False) -> None:
    module.to_empty(device=torch.get_default_device(), recurse=recurse)  # memory, without values
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


@on_ranks(2)
def deviations() -> list[Any]:
    found, device = [], torch.get_default_device()
    for name in ("built by each rank", "reset_parameters()", "param_init_fn=own_values"):
        torch.manual_seed(0)
        with device if "built" in name else torch.device("meta"):
            gpt = GPT(**DEMO)
        init_fn = own_values if "own" in name else None
        model = FSDP(gpt, auto_wrap_policy=BLOCKS, param_init_fn=init_fn)
        loss, values = loss_of(model), model.state_dict()
        found.append([values[key].std().item() for key in ("token.weight", "head.weight")])
        if dist.get_rank() == 0:
            print(f"{name:24}  embedding {found[-1][0]:.3f}, head {found[-1][1]:.3f}, "
                  f"loss {loss:.2f}")  # fmt: skip
    return found


# %% [markdown]
# The values that `__init__` has drawn were drawn on meta, which means nowhere. What
# `reset_parameters()` draws are PyTorch's defaults: an embedding with a deviation of 1, fifty times
# as large. No error says so, and the model trains. It is just not the model that you wrote, and a
# run with other settings that built it in memory starts from a different one. So the model's own
# way to initialize belongs in a function of its own, `param_init_fn`. FSDP calls it with each
# module.
#
# Such a function should fill only what the module has itself (`recurse=False` above), and not what
# is below it. PyTorch's first FSDP got that wrong in its own default until [a
# rework](https://github.com/pytorch/pytorch/pull/104189): an outer unit gave new values to inner
# ones that had theirs already.
#
# ## Taken out: two steps of wrapping
#
# Nothing on this page is a layer, since all of it is over before the first forward. It is a step of
# wrapping, in [materialize.py](../minifsdp/wrapping/materialize.py), and part of that step is to
# hide the inner units. Here `own_values` fills everything below a module, with `recurse=True`.
# First the hiding is taken out, then the whole step. (`three_times` is in
# [taken_out.py](taken_out.py). The first line of the experiment has PyTorch [fill new memory with
# NaN](https://docs.pytorch.org/docs/stable/deterministic.html).)


# %%
@on_ranks(2)
def without_a_step() -> None:
    torch.use_deterministic_algorithms(True)
    everything_below = partial(own_values, recurse=True)

    def program() -> str:
        with torch.device("meta"):
            gpt = GPT(**DEMO)
        model = FSDP(gpt, auto_wrap_policy=BLOCKS, param_init_fn=everything_below)
        return f"loss {loss_of(model):.1f}"

    three_times(program, call("minifsdp.wrapping.materialize._hidden_units", nullcontext))
    three_times(program, call("minifsdp.wrapping.build.materialize"))


# %% [markdown]
# When the blocks are visible, the root gives all of them new memory, and what is in that memory is
# what they are trained from. Without the NaN it would be old numbers, and nobody would know.
# Without the whole step the shards are cut on the meta device, and the first forward finds no
# device that it knows.
#
# ## What breaks: a table that nobody fills
#
# A buffer (page [14](14_precision.md)) is on meta, too. Here positions are not learned but a fixed
# table of sines, which is computed when the module is built. There is no parameter in it, so its
# author sees nothing to reset:


# %%
class Places(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(context, width))
        self.fill()

    def fill(self) -> None:
        rows, columns = (torch.arange(n, dtype=torch.float32) for n in self.table.shape)
        self.table.copy_(torch.sin(rows[:, None] / 10 ** (4 * columns / len(columns))))

    def reset_parameters(self) -> None:
        pass  # there are no parameters

    def forward(self, places: Tensor) -> Tensor:
        return self.table[places]


class ThatFills(Places):
    def reset_parameters(self) -> None:
        self.fill()


@on_ranks(2)
def forgotten() -> list[float]:
    torch.use_deterministic_algorithms(True)  # new memory is all NaN
    losses = []
    for kind in (Places, ThatFills):
        torch.manual_seed(0)
        with torch.device("meta"):
            gpt = GPT(**DEMO)
            gpt.place = kind(CONTEXT, DEMO["width"])
        losses.append(loss_of(FSDP(gpt, auto_wrap_policy=BLOCKS)))
    return losses


def a_table() -> None:
    forgot, filled = forgotten()[0]
    print(f"loss, if reset_parameters() fills the table: {filled:.2f}; if not: {forgot}")


# %% [markdown]
# The table is whatever was in that memory before, and nobody can tell. Often it is zeros, and then
# the model does not know positions. The experiment shows NaN because of its first line, the same as
# in the experiment above: you see what nobody has filled. Use that line once with every model
# that you build on meta.
#
# This happens to good libraries. In transformers a model [read a table of positions that nobody had
# written](https://github.com/huggingface/transformers/issues/45902). In torchtitan such a table
# [was forgotten twice](https://github.com/pytorch/torchtitan/issues/4783). There was no error, and
# the loss of a trained model began near that of a random one.
#
# ## Predict, then run
#
# 1. Two ranks materialize the GPT from the seed 0, and so do four. Do both begin with the same
#    parameters?
# 2. Each rank has a different seed. Does any rank then have a block that came from one seed?
#
# <details><summary>Answers</summary>
#
# 1. Yes. Each rank draws the values of a whole unit and then cuts it, so how many ranks there are
#    makes no difference.
# 2. No. Each rank cuts its shard out of its own values, and a gathered block is pieced together
#    from all of them. That is a different model for each number of ranks, and minifsdp refuses to
#    train it. Page [19](19_sync_states.md) is about such mixtures.
#
# </details>


# %% [hidden]
@on_ranks(2)
def of_two(seeds: int) -> Tensor:
    return materialized(seeds)


@on_ranks(4)
def of_four(seeds: int) -> Tensor:
    return materialized(seeds)


def materialized(seeds: int) -> Tensor:
    torch.manual_seed(dist.get_rank() % seeds)
    with torch.device("meta"):
        gpt = GPT(**DEMO)
    model = FSDP(gpt, auto_wrap_policy=BLOCKS)
    block = [value.flatten() for name, value in model.state_dict().items() if "blocks.0" in name]
    return torch.cat(block)


def answers() -> None:
    same, mixed = of_two(1)[0], of_two(2)[0]
    assert torch.equal(same, of_four(1)[0])  # 1. yes
    assert torch.equal(mixed[:999], same[:999]) and not torch.equal(mixed[-999:], same[-999:])  # 2.
    with torch.device("meta"):
        big = MODELS["gpt-7b"].build()
    block, size = (sum(p.nbytes for p in m.parameters()) for m in (big.blocks[0], big))
    sizes = round(2 * block / 1e9, 1), round(size / 8e9, 1), round(size / 1e9)
    assert sizes == (1.6, 3.3, 27)
    assert round((2 * block + size / 8) / 1e9) == 5
    assert round((size + block + block / 8) / 1e9) == 28


# %% [hidden]
def main() -> None:
    seven_billion()
    draw()
    (_, defaults, own), _ = deviations()
    without_a_step()
    assert round(defaults[0]) == 1 and own[0] < 0.021 and defaults[0] > 49 * own[0]
    a_table()
    answers()


if __name__ == "__main__":
    main()

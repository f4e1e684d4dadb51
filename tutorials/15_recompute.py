"""Recomputation: python tutorials/15_recompute.py; the page is 15_recompute.md."""

# %% [markdown]
# # Recomputation: what sharding does not divide
#
# You shard a model among 64 GPUs, and each keeps a 64th of the parameters, of the gradients and of
# Adam's averages. Then you raise the batch, and it is out of memory. What fills it now?
#
# The gradient of `x @ w` with respect to `w` needs `x`. So autograd keeps the input of every matrix
# product, of every GELU and every norm, from the forward until the backward has used it. These
# tensors are called *activations*. There is one set for each token, and every rank has different
# tokens, so there is nothing to shard. Here is what the GPT of `make demo` keeps, for a batch of 16
# sequences of 64 tokens:

# %% [hidden]
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import fsdp_in_one_file
import torch
from launch import on_ranks
from recomputed import HOW, Around, two_steps
from taken_out import layer, off_ddps, three_times
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from train_gpt import BATCH, CONTEXT, GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.on_demand import OnDemand
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure, simulate
from minifsdp.sim.figures.report import report
from minifsdp.sim.training.recompute import recompute
from minifsdp.sim.views.timeline import svg

PICTURE = Path(__file__).with_suffix(".svg")
LOSSES: list[Tensor] = []
torch.set_num_threads(1)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=4, width=128)


def tokens(batch: int = BATCH, length: int = CONTEXT) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(0))


# %%
def kept(model: nn.Module, x: Tensor) -> int:
    """The bytes that a forward leaves for its backward, without the parameters."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in own)


def what_a_forward_keeps() -> None:
    params = sum(param.nbytes for param in gpt().parameters())
    for how in ("none", "full"):
        model = gpt()
        recompute(list(model.blocks), how)
        print(f"recompute {how}: activations {kept(model, tokens()) / 1e6:4.1f} MB; parameters "
              f"{params / 1e6:.1f} MB, of a rank among 64 {params / 64e6:.2f} MB")  # fmt: skip


# %% [markdown]
# In the first line the activations take ten times as much memory as the parameters of the whole
# model. They grow with the batch and with the length of its sequences, and more GPUs do not divide
# them.
#
# *Recomputation*, in PyTorch *activation checkpointing*
# ([Chen et al.](https://arxiv.org/abs/1604.06174)), is the second line. Of a block it keeps nothing
# but the input. When the backward gets to the block, its forward is run again, and then there are
# activations of one block. In code it is a function around a call:
#
# ```python
# y = checkpoint(block, x, use_reentrant=False)  # in place of y = block(x)
# ```
#
# ("Checkpoint" is an unlucky word: it has nothing to do with files.) A block that is run twice
# computes more. How much more, and for how much memory? Here is a GPT of 1.3 billion parameters on
# two virtual machines of 8 GPUs:


# %%
RUN = "--model gpt-1.3b --gpu a100-80 --nodes 2 --network 800 --batch 8 --seq 1024 --recompute "


def on_virtual_gpus() -> None:
    tapes, plain = {}, {}
    for how in ("none", "selective", "full"):
        gpu = simulate(parser().parse_args((RUN + how).split()))
        tapes[f"recompute: {how}"], figures = gpu.tape, gpu.report()
        plain = plain or figures
        print(f"{how:9} step {figures['step'] * 1e3:4.0f} ms, peak "
              f"{figures['peak allocated'] / 2**30:4.1f} GiB, "
              f"{figures['flops'] / plain['flops']:.2f} x the operations, "
              f"{figures['bytes sent'] / 1e9:.1f} GB sent")  # fmt: skip
    draw(tapes)


# %% [hidden]
def draw(tapes: dict[str, Any]) -> None:
    PICTURE.write_text(svg({name: tapes[name] for name in [*tapes][::2]}))  # the first, the last
    reports = [report(tape) for tape in tapes.values()]
    peaks = [round(figures["peak allocated"] / 2**30) for figures in reports]
    assert peaks == [18, 10, 7]  # as the picture's text says
    assert round((reports[-1]["step"] - reports[0]["step"]) * 100) == 8  # all in the backward


# %% [markdown]
# ![Two timelines with the memory below. Without recomputation memory climbs through the forward to
# 13 GiB, has a peak of 18 GiB at the loss and falls through the backward. With full recomputation
# it stays near 2 GiB but for the same short peak, and the backward is 80 ms
# longer.](15_recompute.svg)
#
# The green staircase is the activations: each block leaves a step in the forward and takes it away
# in the backward. With *full* recomputation only the narrow peak at the end of the forward is left.
# It is the *logits*, a number for each token and each word of the vocabulary, which are outside of
# the blocks. *Selective recomputation* keeps what is expensive to compute (here attention, and
# every second matrix product) and runs the rest again ([Korthikanti et
# al.](https://arxiv.org/abs/2205.05198)).
#
# What should full recomputation cost? A matrix product has two of its size in the backward, one for
# the gradient of each operand. Forward and backward are three parts; a second forward makes it
# four, 1.33 times the operations. It is less here, because the second forward stops as soon as
# everything is there that the backward needs. A block's last product, a third of its operations, is
# left out, because nothing in the block uses its result.
#
# ## Around the unit or inside of it
#
# With FSDP a forward is preceded by a gather. Does a second forward need a second gather? It
# depends on what is wrapped in what. The checkpoint may be around the unit, so that the unit's
# hooks run again with it, or inside of the unit, so that they do not. First, here it is in the file
# of page 06:


# %%
@on_ranks(2)
def one_file_with(where: str, whole: bool = False) -> str:
    model, noted = gpt(), []
    if where == "inside":
        recompute(list(model.blocks), "full")  # each block's forward, in a checkpoint
    engine = fsdp_in_one_file.fsdp(model, Block)
    unshard = fsdp_in_one_file.Unit.unshard
    fsdp_in_one_file.Unit.unshard = lambda unit: (noted.append(unit), unshard(unit))
    if where == "around":  # a checkpoint around the call of each block, hooks and all
        model.blocks = nn.Sequential(*map(Around, model.blocks))
    try:
        with set_checkpoint_early_stop(not whole):
            model(tokens(1)).sum().backward()
    except (AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return f"{len(noted)} gathers of {len(engine.units)} units"


def in_one_file() -> None:
    print("no checkpoint:                     ", one_file_with("nowhere")[0])
    print("around:                            ", one_file_with("around")[0])
    print("around, the whole forward is run:  ", one_file_with("around", True)[0])
    print("inside:                            ", one_file_with("inside")[0])


# %% [markdown]
# - **Around** it works, with a third gather for each block: one in the forward, one when the
#   gradient arrives at the block's output, and one by the forward that is run again.
# - If that forward is run to its end, it does what every forward does at its end: it frees the
#   unit. The backward then finds no memory. (It works in the line above because the second
#   forward stops early and never gets to its end.)
# - **Inside** the hooks do not run again, so nobody gives the modules their views.
#
# All of this has happened. In fairscale, [a checkpoint around a unit cost a third
# gather](https://github.com/facebookresearch/fairscale/issues/777), so one was told to write
# `FSDP(checkpoint(block))`, inside. With PyTorch's first FSDP [a user counted two gathers in the
# backward](https://github.com/pytorch/pytorch/issues/105635), since the library with his model had
# put it around. minifsdp gathers as often either way:


# %%
@on_ranks(2)
def in_the_engine() -> None:
    for where in ("nowhere", "inside", "around"):
        module, calls = gpt(), []
        if where == "inside":
            recompute(list(module.blocks), "full")
        for block in module.blocks:
            block.norm1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}))
        if where == "around":
            recompute(list(module.blocks), "full")  # now they are units
        model(tokens(1)).sum().backward()
        stats = model.engine.stats
        if torch.distributed.get_rank() == 0:
            print(f"{where:8} {len(calls)} forwards of blocks, {stats.all_gathers} gathers")
        assert len(calls) == (4 if where == "nowhere" else 8) and stats.all_gathers == 9


# %% [markdown]
# The pre-backward hook gathers the unit and gives its modules views, so a checkpoint inside works.
# And a forward does not free a unit that is in its backward. It lets go of its own reason, FORWARD,
# and BACKWARD is left:
#
# {{ minifsdp/core/engine.py Engine.leave }}
#
# ## Taken out: the layer that gathers on demand
#
# Does a checkpoint inside always work? The unit is gathered in the backward because a gradient
# arrives at its output. Here is a module whose output plays no part in the loss. It computes a loss
# of its own in a checkpoint, as routers of experts do, and puts it into a list. The backward comes
# straight to that loss, and when it runs the checkpoint again, nobody has gathered the unit. So
# there is a layer, `OnDemand` in [on_demand.py](../minifsdp/on_demand.py). While a unit is sharded,
# its modules have *placeholders*, and the layer gathers the unit when somebody wants to use one.
# (`three_times` and `off_ddps` are in [taken_out.py](taken_out.py).)


# %%
class Router(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(checkpoint(super().forward, x, use_reentrant=False).square().mean())
        return x


@on_ranks(2)
def without_the_layer() -> None:
    def backward(model: nn.Module) -> None:
        model(torch.full((2, 8), 1.0 + torch.distributed.get_rank()))
        LOSSES.pop().backward()

    def program() -> str:
        plain, policy = nn.Sequential(Router(8, 8)), ModuleWrapPolicy({Router})
        return off_ddps(backward, FSDP(deepcopy(plain), auto_wrap_policy=policy), plain)

    three_times(program, layer(OnDemand))


# %% [markdown]
# With the layer the gradient is DDP's. Without it the second forward finds a placeholder, which can
# only say what parameter it stands for.
#
# ## Freed early, and needed again
#
# The layer also frees units early. A GPT's root has the embedding and the head. In the backward the
# head comes first and the embedding last, with all blocks between them. So the root would stay
# gathered throughout, although the backward of an embedding reads no parameter. But whenever the
# backward gets to a unit inside another one, the layer asks of the outer one: is there anything
# left that autograd has saved of its parameters? If not, the outer unit is freed.
#
# A checkpoint defeats that question. Autograd saves nothing of what a checkpoint will run again, so
# the unit seems to be done with when it is not. Here are two steps of a model whose root has no
# layer between the blocks, then a plain one, then one in a checkpoint (`two_steps` is in
# [recomputed.py](recomputed.py)):


# %%
def freed_early() -> None:
    for how in HOW:
        two_steps(how)


# %% [markdown]
# Without a layer between the blocks the root stays freed during all their backwards. A plain layer
# keeps it until the first block is all that is left. With the checkpoint the root is freed too
# early in step 1, and the second forward has it gathered once more. `OnDemand` remembers that. From
# step 2 on this root stays, because otherwise every checkpoint in it would cost a gather.
#
# Two more things keep a unit from being freed early. Somebody may have kept one of its parameters.
# And there may be a second graph, which the program has dropped. Python's collector may remove that
# graph at a different moment on each rank, and all ranks have to free alike.
#
# ## What breaks: a second forward that is not the first one
#
# The gradients are right only if both forwards compute the same. A layer that draws random numbers
# does not, unless the state of the random generator is put back. PyTorch does so, unless it is told
# not to, to save time. Here a layer with dropout, whose gradients are compared with those without a
# checkpoint:


# %%
def dropout() -> None:
    for preserve in (True, False):
        grads, losses = [], []
        for again in (False, True):
            torch.manual_seed(0)
            x = torch.randn(8, 64)
            layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
            run = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=preserve)
            y = run(x) if again else layer(x)
            y.sum().backward()
            grads.append(layer[0].weight.grad)
            losses.append(y.sum())
        off = (grads[0] - grads[1]).norm() / grads[0].norm()
        print(f"preserve_rng_state={preserve!s:5}  the same loss: {losses[0] == losses[1]}, "
              f"gradient off by {off:.0%}")  # fmt: skip


# %% [markdown]
# The loss is right, no error comes, and the gradient is wrong by nearly its own size. The same
# happens to a layer that counts its calls, or that updates running statistics twice.
#
# ## Predict, then run
#
# 1. The batch has 32 sequences of 32 tokens instead of 16 of 64. How do the activations change?
# 2. On GPUs of 40 GB the GPT with 1.3 billion parameters does not fit with a batch of 24. Does it
#    with full recomputation?
#
# <details><summary>Answers</summary>
#
# 1. They do not, to within 1 %: it is the same number of tokens. (Attention, as it is computed
#    here, does not keep a table of all pairs of tokens. That table would halve.)
# 2. Yes. Of what does not fit, most is activations.
#
# </details>


# %% [hidden]
def answers() -> None:
    ratio, again = kept(gpt(), tokens(32, 32)) / kept(gpt(), tokens(16, 64)), (2 + 1 + 1) / (2 + 1)
    assert abs(ratio - 1) < 0.01 and round(again, 2) == 1.33  # 1. they do not change
    large = RUN.replace("a100-80", "a100-40").replace("--batch 8", "--batch 24")
    assert measure(parser().parse_args((large + "full").split()), 2)[0]["fits"]  # 2. yes
    assert not measure(parser().parse_args((large + "none").split()), 2)[0]["fits"]


# %% [hidden]
def main() -> None:
    what_a_forward_keeps()
    on_virtual_gpus()
    in_one_file()
    in_the_engine()
    without_the_layer()
    freed_early()
    dropout()
    answers()


if __name__ == "__main__":
    main()

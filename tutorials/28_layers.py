"""Layers: python tutorials/28_layers.py; the page is 28_layers.md."""

# %% [markdown]
# # Three layers taken away
#
# FSDP in one file fits on two screens ([06](06_one_file.md)), and minifsdp has thousands of lines.
# What are they for? Some of them are [the core](../minifsdp/core/__init__.py): a whole FSDP in one
# folder, which you can read in an afternoon, copy out of here and train with
# (`make demo ARGS="--core"`). Its [`engine.py`](../minifsdp/core/engine.py) has the five moments of
# a step, and no line of it is about anything else. Much of what is around the core are *layers*:
# each is a class of its own, which has something to do at some of the moments. This is a layer, as
# it is:
#
# {{ minifsdp/checks/param_changes.py Unchanged }}
#
# It is called twice in the course of a step: when a module has its parameters, and when the first
# gradient has reached the unit. (`again` is called when one more gradient reaches the unit in the
# same backward.) An engine asks each layer once at which moments it has something to do. Where no
# layer has, nothing is called. Here are the moments at which layers of an ordinary model are
# called, each with its layers in the order of the calls
# ([layers.py](../minifsdp/core/layers.py) says when each moment is):

# %% [hidden]
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import strips
from launch import on_ranks
from taken_out import gradients, layer, said, three_times
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.between_steps.idle import Readers
from minifsdp.checks.param_changes import Unchanged, Untouched
from minifsdp.precision import Precision
from minifsdp.support.grad_hooks import GradientHooks
from minifsdp.support.shard_changes import ShardChanges

PICTURE = Path(__file__).with_suffix(".svg")
COLOURS = ("blue", "purple", "green", "orange", "red", "lightblue", "lightpurple", "teal", "amber")
MOMENTS = "before_forward gathered inputs around_forward after_forward before_backward gradient"
torch.set_num_threads(1)


class Block(nn.Sequential):
    """The modules to make units of."""


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def batch(step: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 8, generator=generator, device="cpu").to(torch.get_default_device())


def wrapped() -> Any:
    return FSDP(plain(), auto_wrap_policy=ModuleWrapPolicy({Block}))


# %%
@on_ranks(1)
def table() -> None:
    print(wrapped().engine.moments)


# %% [hidden]
@on_ranks(1)
def called() -> tuple[list[str], dict[str, list[str]]]:
    """The layers; and for each moment of a unit those that have something to do."""
    moments = wrapped().engine.moments
    methods = {name: getattr(moments, name) for name in MOMENTS.split()}
    at = {name: [type(m.__self__).__name__ for m in found] for name, found in methods.items()}
    return [type(layer).__name__ for layer in moments.layers], at


def draw() -> None:
    ((layers, at),) = called()
    colours = dict(zip([name for name in layers if name in str(at)], COLOURS, strict=True))
    rows = [(moment, [(1, colours[name], name) for name in found]) for moment, found in at.items()]
    strips(PICTURE, "who is called at the moments of one unit, from left to right", rows)


# %% [markdown]
# ![Seven strips, one for each moment of a unit, with the layers that are called at it: four before
# a forward, four when the unit is gathered, five before its backward, and one or two at the
# others.](28_layers.svg)
#
# ## Without all of them
#
# Here only three of the layers are left. `ShardChanges` and `Precision` choose the device and the
# dtypes to compute in. `Readers` waits at the end for ranks of the same machine that still read
# this rank's shards. Does the model still train?


# %%
def losses(model: Any, mean_over_ranks: bool) -> Iterator[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(batch(step)).pow(2).sum()
        loss.backward()
        if mean_over_ranks:  # as DistributedDataParallel does it
            for param in model.parameters():
                dist.all_reduce(param.grad.div_(dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@on_ranks(2)
def with_three() -> bool:
    expected = [*losses(plain(), True)]
    model = wrapped()
    engine, kept = model.engine, (ShardChanges, Precision, Readers)
    all_of_them = engine.moments.layers
    engine.use([layer for layer in all_of_them if isinstance(layer, kept)])
    same = [*losses(model, False)] == expected
    print(f"{len(engine.moments.layers)} layers of {len(all_of_them)}: bit-equal to DDP: {same}")
    return same


# %% [markdown]
# It does, in every bit. So what are the other ones for? For programs that do more than train. Three
# of them follow. `three_times`, in [taken_out.py](taken_out.py), runs each as it is, without one
# layer, and with that layer put back.
#
# **A step between a forward and its backward.** The gradient belongs to parameters that are gone.
# In plain PyTorch autograd raises an error; it has saved the old tensors, and sees that they were
# changed. Of a sharded unit it has saved the place of the parameters ([04](04_unshard.md)), and at
# that place it finds the new ones.


# %%
def a_step_too_early(factor: float) -> str:
    model = wrapped()
    model(batch()).pow(2).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    late = model(batch()).pow(2).sum()
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(factor)
    late.backward()
    off = (gradients(model) - expected).norm() / expected.norm()
    return f"no error; the gradient is off by {off:.0%}"


@on_ranks(2)
def without_unchanged() -> None:
    three_times(partial(a_step_too_early, 0.5), layer(Unchanged))


# %% [markdown]
# **A parameter that is changed in its own forward**, to keep weights small for example. In the
# forward it is a view of memory that is freed afterwards, so the change is lost.


# %%
def a_change_in_a_forward() -> str:
    model = wrapped()
    changed = model.module[1].module[0]

    def clamp(module: nn.Module, inputs: object) -> None:
        module.weight.data.clamp_(-0.01, 0.01)

    changed.register_forward_pre_hook(clamp)
    model(batch())
    with FSDP.summon_full_params(model):
        return f"no error; the largest weight is {changed.weight.abs().max():.2f}"


@on_ranks(2)
def without_untouched() -> None:
    three_times(a_change_in_a_forward, layer(Untouched))


# %% [markdown]
# **A hook on a gradient**, to clamp it. torch calls such a hook when a gradient reaches the
# parameter. But the optimizer's parameter is a shard, and no gradient ever reaches it: it is put
# there, at the end of the backward.


# %%
def a_hook_on_a_gradient() -> str:
    model = wrapped()
    for shard in model.parameters():
        shard.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model(batch()).pow(2).sum().backward()
    return f"the largest element of a gradient is {gradients(model).abs().max():.2f}"


@on_ranks(2)
def without_grad_hooks() -> None:
    three_times(a_hook_on_a_gradient, layer(GradientHooks))


# %% [markdown]
# None of the three programs crashes without its layer. Each goes on with numbers that are wrong,
# and says nothing. That is what most of the engine is about.
#
# ## What else can be taken out
#
# This page begins the second part of the course. These pages, too, take out what they are about,
# and not everything that surrounds the core is a layer:
#
# | page | taken out | which is | without it |
# | --- | --- | --- | --- |
# | [13](13_targets.md) | `is_sound`, `Mistargets` | a check, a layer | gathers in vain, uncounted |
# | [14](14_precision.md) | `Cast`, `Precision` | a stage, a layer | rounded sums; an odd error |
# | [15](15_recompute.md) | `OnDemand` | a layer | a second forward finds no parameters |
# | [17](17_offload.md) | `Download`, a wait | a stage, a wait | an odd error; races |
# | [18](18_materialize.md) | `_hidden_units` | part of a step of wrapping | values that are lost |
# | [19](19_sync_states.md) | `RankAgreement` | a layer | a patchwork of two models |
# | [20](20_no_sync.md) | `AddUnreduced` | a stage | three of four gradients are lost |
# | [21](21_clip_grad.md) | `add_up` | a function between steps | each rank has a norm of its own |
# | [22](22_hybrid.md) | `AllReduce` | a stage | two models that drift apart |
# | [23](23_settings.md) | STRATEGY | a reason | `SHARD_GRAD_OP` gathers twice |
# | [27](27_checkpoints.md) | `check` | a function between steps | a damaged file is loaded |
# | [31](31_debugging.md) | `RankAgreement` | a layer | ranks that wait for each other |
#
# ## What a layer may not do
#
# Layers observe and check. What is *different* for some units is not in a layer: how a shard is cut
# and sent, and what becomes of a gradient on its way, are the unit's
# [strategies](../minifsdp/strategies.py). Nor is a layer asked whether a unit may be freed. Whoever
# needs the unit has said so before, with a [reason](../minifsdp/core/unit_state.py). No layer has
# to know another one's reasons.
#
# ## Predict, then run
#
# 1. Without `Unchanged`, is the gradient wrong if the step that comes too early changes nothing,
#    because the learning rate is 0?
# 2. `GradientHooks` is the last of all layers. A hook on a gradient may be an optimizer. What could
#    it write to, if it were called before `Readers`?
#
# <details><summary>Answers</summary>
#
# 1. No. But as it is, it is refused all the same: what is noticed is that the shard was written to,
#    not that it has other values.
# 2. To its shard, which another rank on the same machine may still be reading. That rank would
#    compute with parameters of which some are from the next step.
#
# </details>


# %% [hidden]
@on_ranks(2)
def a_step_of_nothing() -> None:
    with layer(Unchanged):
        assert a_step_too_early(1.0) == "no error; the gradient is off by 0%"
    assert said(partial(a_step_too_early, 1.0)).startswith("RuntimeError: the parameters of unit")


def answers() -> None:
    a_step_of_nothing()  # 1. no; and refused all the same
    ((layers, _),) = called()
    assert layers[-2:] == ["Readers", "GradientHooks"]  # 2. the shard, before it is read


def main() -> None:
    table()
    draw()
    assert all(with_three())
    without_unchanged()
    without_untouched()
    without_grad_hooks()
    answers()


if __name__ == "__main__":
    main()

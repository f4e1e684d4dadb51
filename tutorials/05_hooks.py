"""Hooks: python tutorials/05_hooks.py; the page is 05_hooks.md."""

# %% [markdown]
# # Hooks: a training step from inside autograd
#
# The user writes `loss = model(x)` and `loss.backward()`. During the first call the parameters of
# each unit have to be gathered just before it runs, and freed after it. During the second they have
# to come back, because the backward of `x @ w` needs `w`, and they have to go again when the
# gradient of the unit is there. Both calls are PyTorch's. At which moments can our own code run?
#
# Here are two layers in plain PyTorch, each with its parameters in one flat tensor. They note every
# moment that there is. Before you read the output: what comes first in the backward, and is the end
# of the backward the same as the last gradient?

# %% [hidden]
import contextlib
import warnings
from typing import Any
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from draw import strips
from launch import on_ranks
from torch import Tensor, nn
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.core.engine import Engine
from minifsdp.core.unit import Unit
from minifsdp.core.views import make_views
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate

PICTURE, NAMES = __file__.replace(".py", ".svg"), ("root", *(f"block {i}" for i in range(1, 5)))
COLOURS = ("teal", "blue", "purple", "green", "orange")  # of the units, as on page 04
WORDS = {"before_forward": "pre", "after_forward": "post", "before_backward": "pre"}
WORDS |= {"after_gradient": "post", "end_of_backward": "end"}
NOT_AHEAD: Any = {"backward_prefetch": None, "forward_prefetch": False}


# When a method of the engine has done its work: its name; whose moment it is, 0 is the root; and of
# each unit whether its parameters are in memory.
Moment = tuple[str, int, list[bool]]


def noting(method: str, steps: list[list[Moment]]) -> Any:
    original = getattr(Engine, method)

    def noted(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        storages = [unit.unsharded.flat_param.untyped_storage() for unit in engine.units]
        there = [storage.size() > 0 for storage in storages]
        steps[-1].append((method, engine.units.index(args[0]) if args else 0, there))
        return result

    return patch.object(Engine, method, noted)


@on_ranks(2)
def train(make: str, calls: str) -> tuple[list[list[Moment]], list[Any]]:
    steps: list[list[Moment]] = []
    views = {"make_views": make_views, "make_once": make_once}[make]
    gpt = GPT(layers=4, width=128)
    gpt.blocks = nn.Sequential(*(gpt.blocks[int(call) - 1] for call in calls))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("minifsdp.core.engine.make_views", views))
        for method in WORDS:
            stack.enter_context(noting(method, steps))
        model = FSDP(gpt, auto_wrap_policy=ModuleWrapPolicy({Block}), **NOT_AHEAD)
        for _ in range(2):
            steps.append([])
            model(torch.randint(256, (1, 16))).pow(2).mean().backward()
    return steps, [unit.sharded_flat_param.grad.tolist() for unit in model.engine.units]


def filled(moment: Moment) -> int:
    return sum(moment[-1])


def draw(steps: dict[str, list[Moment]]) -> None:
    rows: list[Any] = []
    for heading, step in steps.items():
        forward = [method for method, *_ in step].index("before_backward")
        rows.append((heading, []))
        rows.append(("", [(forward, "", "forward"), (len(step) - forward, "", "backward")]))
        for unit, name in enumerate(NAMES):
            boxes = [
                (1, COLOURS[unit] * there[unit], WORDS[method] * (unit == whose))
                for method, whose, there in step
            ]
            rows.append((name, boxes))
        rows.append(("in memory", [(1, "", str(filled(moment))) for moment in step]))
    assert all(len(step) == 21 for step in steps.values())
    strips(PICTURE, "units in memory after each moment of a training step", rows)


# %%
def layer(name: str, x: Tensor, log: list[str]) -> Tensor:
    flat = torch.ones(4, requires_grad=True)
    flat.register_post_accumulate_grad_hook(lambda _: log.append(f"post {name}"))
    log.append(f"pre {name}")
    y = x @ flat.view(2, 2)
    y.grad_fn.register_prehook(lambda _: log.append(f"pre {name}"))
    log.append(f"post {name}")
    return y


def two_layers() -> None:
    log: list[str] = []
    y = layer("b", layer("a", torch.ones(1, 2), log), log)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    y.grad_fn.register_prehook(lambda _: queue(lambda: log.append("end")))
    y.sum().backward()
    print(f"forward:  {', '.join(log[:4])}\nbackward: {', '.join(log[4:])}")


# %% [markdown]
# These are the five moments of FSDP:
#
# - *Pre-forward* and *post-forward* are before and after the computation. Here they are ordinary
#   lines; for a module they are hooks that it calls.
# - *Pre-backward* is a hook on the operation that made the output. Autograd calls it just before
#   the backward of that operation, which is the first of the layer.
# - *Post-backward* is a hook on the flat tensor. The layer has computed with views of it, so its
#   gradient is complete when all gradients of the layer are.
# - The *end* is a callback that can be queued while a backward runs. Autograd calls it after the
#   last operation, so that it comes even if some layer got no gradient.
#
# At each of them the engine does its work. This is the post-backward. It frees the parameters, and
# starts to reduce the gradient:
#
# {{ minifsdp/core/engine.py Engine.after_gradient -.prefetch( }}
#
# (Letting go of a reason frees the unit if no other reason is left
# ([unit_state.py](../minifsdp/core/unit_state.py)). On this page none ever is. How the hooks are
# set is in [autograd_hooks.py](../minifsdp/core/autograd_hooks.py). One more,
# [saved_tensors.py](../minifsdp/support/saved_tensors.py), is for outputs that leave a module in an
# attribute, where no hook sees them.)
#
# ## What breaks without it
#
# Each forward of `layer` makes a new view of the flat tensor. So does each forward in the engine,
# for every parameter. That looks like a waste: the new views show the same memory as the old ones.
# So let us make them once. Here is the GPT of `make demo` with its five units, four blocks and the
# root. Nothing is gathered ahead of time. (`train` is in [the program](05_hooks.py); it notes which
# units have memory at each moment.)


# %%
def make_once(unit: Unit) -> None:
    if not unit.views:
        make_views(unit)


def five_units() -> None:
    (each, grads), *_ = train("make_views", "1234")
    (once, grads_of_once), *_ = train("make_once", "1234")
    for make, steps in {"views in each forward": each, "views made once": once}.items():
        most = [max(map(filled, step)) for step in steps]
        print(f"{make}: at most {most[0]} units in memory in step 1, {most[1]} in step 2")
    print("the same gradients, in every bit:", grads == grads_of_once)
    draw({"new views in each forward, step 2": each[1], "views made once, step 2": once[1]})


def a_gpt_on_virtual_gpus() -> None:
    for make in (make_views, make_once):
        with patch("minifsdp.core.engine.make_views", make):
            gpu = simulate(parser().parse_args(["--model=gpt-1.3b", "--batch=1", "--seq=512"]))
        print(f"{make.__name__}: {gpu.report()['peak allocated'] / 2**20:,.0f} MiB at the peak")


# %% [markdown]
# ![Two charts with a row for each of five units and 21 moments side by side. Above, one block at a
# time has memory, in the forward beside the root. Below, in the backward, the four blocks get it
# one after the other and all keep it until nearly the end.](05_hooks.svg)
#
# Compare the right halves, the backward. Above, the blocks take turns. Below, every "pre" comes
# before every "post", so all blocks are in memory at once, as if nothing were freed. (The root's
# memory is freed before the first block's backward, in both. The backward of its last layer, the
# head, is over, and what is left, that of the embeddings, needs none of its parameters. So the
# engine does not wait for the root's "post". PyTorch's FSDP does.)
#
# The gradients are right, and the first step is as it should be. Only the peak of the memory shows
# that something is wrong. For a GPT of 1.3 billion parameters on virtual GPUs it is most of what
# sharding had saved.
#
# The reason is how autograd chooses what to do next. It has a queue of operations whose gradients
# are there, and takes the one that was *created* last in the forward. Taking a view is an
# operation. A new view was made just before the computation of its layer, so in the backward its
# turn comes just after. A view from an earlier step is older than all of this step's operations.
# Its backward waits until everything else is done, and only then is the gradient of the flat tensor
# complete.
#
# ## Predict, then run
#
# 1. Block 1 is called twice in each forward, first and last. How often is it gathered in a step,
#    and how often is its gradient reduced?
# 2. How many of the five units are in memory at once, then?
#
# <details><summary>Answers</summary>
#
# 1. It is gathered three times: for each of its two calls in the forward, and once in the backward.
#    Its gradient is reduced once, when both calls have added to it.
# 2. Two. In the forward they are the root and the block whose turn it is. In the backward they are
#    block 1 and the block whose turn it is: block 1's backward begins first, with its last call,
#    and is complete only after its first call, so it stays all the time in between.
#
# </details>


# %% [hidden]
def answers() -> None:
    (each, _), *_ = train("make_views", "12341")
    moments = [WORDS[method] for method, unit, _ in each[1] if unit == 1]
    assert moments == ["pre", "post"] * 3  # 1. three and one
    assert max(map(filled, each[1])) == 2  # 2. block 1 and another


# %% [hidden]
def main() -> None:
    two_layers()
    five_units()
    a_gpt_on_virtual_gpus()
    answers()


if __name__ == "__main__":
    main()

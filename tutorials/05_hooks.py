"""Hooks: python tutorials/05_hooks.py; the page is 05_hooks.md."""

# %% [markdown]
# # Hooks: a training step from inside autograd
#
# The user writes `loss = model(x)` and `loss.backward()`. Inside the first call each layer's
# parameters have to be gathered just before it runs, and freed after it. Inside the second they
# have to come back, because the backward of `x @ w` needs `w`, and go when the layer's gradient is
# there. Both calls are PyTorch's. How do you get a word in? Here are two layers, each with its
# parameters in one flat tensor, in plain PyTorch. They note every chance.

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

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.engine import Engine
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.support.param_views import make_views
from minifsdp.unit import Unit
from minifsdp.unit_state import TrainingState

PICTURE, NAMES = __file__.replace(".py", ".svg"), ("root", "block 1", "block 2", "block 3")
WORDS = {"before_forward": "pre", "after_forward": "post", "before_backward": "pre"}
WORDS |= {"after_gradient": "post", "end_of_backward": "end"}
NOT_AHEAD: Any = {"backward_prefetch": None, "forward_prefetch": False}


def noting(moment: str, steps: list[Any]) -> Any:
    method = getattr(Engine, moment)

    def noted(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        result = method(engine, *args, **kwargs)
        boxes = []
        for unit in engine.units:
            started = unit.state.training is TrainingState.PRE_BACKWARD
            there = unit.unsharded.flat_param.untyped_storage().size() > 0
            boxes.append(("purple" if started else "blue") if there else "")
        steps[-1].append((WORDS[moment], engine.units.index(args[0]) if args else 0, boxes))
        return result

    return patch.object(Engine, moment, noted)


@on_ranks(2)
def train(make: str, calls: str) -> tuple[list[Any], list[Any]]:
    steps: list[Any] = []
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in NAMES]
    net = nn.Sequential(blocks[0][0], *(blocks[int(call)] for call in calls))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("minifsdp.engine.make_views", globals()[make]))
        for moment in WORDS:
            stack.enter_context(noting(moment, steps))
        net = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **NOT_AHEAD)
        for _ in range(3):
            steps.append([])
            net(torch.randn(4, 16) + torch.distributed.get_rank()).pow(2).mean().backward()
    return steps, [unit.sharded_flat_param.grad.tolist() for unit in net.engine.units]


def filled(moment: Any) -> int:
    return sum(map(bool, moment[-1]))


def draw(steps: dict[str, list[Any]]) -> None:
    rows: list[Any] = []
    for make, step in steps.items():
        rows.append((make, []))
        for unit, name in enumerate(NAMES):
            rows.append((name, [(1, boxes[unit], word * (unit == of)) for word, of, boxes in step]))
        rows.append(("in all", [(1, "", str(filled(moment))) for moment in step]))
    strips(PICTURE, "a training step", rows, {"blue": "has memory", "purple": "in its backward"})


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
# These are the five moments. *Pre-forward* and *post-forward* are lines before and after the
# computation. *Pre-backward* is a hook on the operation that made the output; it runs just before
# that operation's backward. *Post-backward* is a hook on the flat tensor: the layer has computed
# with a view of it, so its gradient is complete when the layer's is. The *end* is a callback. It
# can only be queued while a backward is running, and runs after the last operation.
#
# The hooks are in [autograd_hooks.py](../minifsdp/support/autograd_hooks.py). The post-backward:
#
# {{ minifsdp/engine.py Engine.after_gradient }}
#
# (Prefetching is page 12, `synchronizes` page 20; `may_reduce` is about ranks that use different
# units.) A tensor may leave a module in an attribute, too, so the pre-backward also comes when
# autograd needs a saved parameter: `minifsdp/support/saved_tensors.py`.
#
# ## What breaks without it
#
# Each forward of `layer` makes a new view of the flat tensor, and so does each forward in the
# engine, for every parameter. Why? They show the same memory as the last ones. Make them once,
# then, in a model of four *units*, which are gathered and freed as a whole: three blocks, and the
# *root*, the model itself with the one layer that is in no block. (Nothing is gathered ahead.)


# %%
def make_once(unit: Unit) -> None:
    if not unit.views:
        make_views(unit)


def four_units() -> None:
    runs = {make: train(make, "123")[0] for make in ("make_views", "make_once")}
    for make, (steps, _) in runs.items():
        print(f"{make}: most units at once, by step:", *(max(map(filled, step)) for step in steps))
    print("the same gradients, in every bit:", runs["make_views"][1] == runs["make_once"][1])
    draw({make: steps[2] for make, (steps, _) in runs.items()})


def a_gpt_on_virtual_gpus() -> None:
    for make in (make_views, make_once):
        with patch("minifsdp.engine.make_views", make):
            gpu = simulate(parser().parse_args(["--model=gpt-1.3b", "--batch=1", "--seq=512"]))
        print(f"{make.__name__}: {gpu.report()['peak allocated'] / 2**20:,.0f} MiB at the peak")


# %% [markdown]
# ![Two charts with a row for each of four units and 17 moments side by side. Above, one block at a
# time has memory beside the root, in the forward and in the backward. Below, in the backward, the
# three blocks get it one after the other and all keep it until nearly the end.](05_hooks.svg)
#
# The one thing to notice is the right half, the backward. Above, the blocks take turns. Below,
# every "pre" comes before every "post": all units have memory at once, as if nothing were freed.
# Yet the gradients are right, and in the first step all is. Only the peak of memory gives it away.
#
# Autograd has a queue of operations that could run now, and takes the one *created* last. Taking a
# view is an operation. A new view was made just before its layer's computation, so in the backward
# its turn comes just after. An old one is older than the whole step, and waits until all is done.
#
# ## Predict, then run
#
# 1. Block 1 is called twice in each forward, first and last. How often is it gathered in a step,
#    and how often is its gradient reduced?
# 2. How many of the four units have memory at once, then?


# %%
def answers() -> None:
    step = train("make_views", "1231")[0][0][2]
    assert [word for word, unit, _ in step if unit == 1] == ["pre", "post"] * 3  # 1. three and one
    assert max(map(filled, step)) == 3  # 2. it stays until the backward of its first call is over


# %% [hidden]
def main() -> None:
    two_layers()
    four_units()
    a_gpt_on_virtual_gpus()
    answers()


if __name__ == "__main__":
    main()

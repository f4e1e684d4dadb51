"""Units: python tutorials/07_unit.py; the page is 07_unit.md."""

# %% [markdown]
# # Units: how much to gather at once
#
# What is gathered together and freed together is a *unit*, and where its borders are is up to you.
# Take a GPT of 1.3 billion parameters in 24 blocks, on 16 nodes of 8 GPUs. The whole model may be
# one unit, or each block, or each half of a block: its attention and its MLP. Which is fastest?

# %% [hidden]
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from launch import on_ranks
from torch import Tensor, nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.tape import Op
from minifsdp.sim.views.timeline import svg

PICTURE = Path(__file__).with_suffix(".svg")


class Block(nn.Sequential):
    pass


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AttributeError, ValueError) as error:
        return textwrap.fill(str(error), 90)
    return ""


# %%
RUN = "--model gpt-1.3b --nodes 16 --network 1600 --batch 2 --seq 512 --unit "


def three_sizes() -> None:
    tapes = {}
    for unit in ("model", "block", "part"):
        gpu = simulate(parser().parse_args((RUN + unit).split()))
        report, tapes[f"units: {unit}"] = gpu.report(), gpu.tape
        sent = [op.end - op.start for op in gpu.tape if isinstance(op, Op) and op.sent]
        print(
            f"{unit:5} {report['step'] * 1e3:.0f} ms: {len(sent) // 3:3} collectives a step, none"
            f" under {min(sent) * 1e3:5.2f} ms; {report['exposed communication'] * 1e3:2.0f} ms"
            f" nothing but them; {report['peak allocated'] / 2**20:,.0f} MiB at the peak"
        )
    PICTURE.write_text(svg(tapes))


# %% [markdown]
# ![Three timelines on one scale. Model: a long purple box, then blue, then purple. Block, the
# shortest: many short purple boxes below blue, which has gaps in the forward only. Part, the
# longest: more of them, and gaps everywhere. The first has three times the memory.](07_unit.svg)
#
# The one thing to notice: the gaps in the `compute` lanes (blue), where it waits for purple.
#
# - **model**: nothing can be computed before all of it is there, and the gradient of a flat tensor
#   is complete when its last part is. The GPU waits at both ends, and holds the whole model.
# - **block**: while a block is computed with, the next one is gathered. (Only a forward is so quick
#   that it has to wait for its gathers.)
# - **part**: the same bytes in three times as many messages. (What is left of a block, a norm, is a
#   unit as well.) Each has the latency of page [02](02_flatten.md), 0.53 ms among 128 GPUs; 218 of
#   that alone are 115 ms. And it saves hardly any memory: a block is small beside the model.
#
# So a unit should take longer to compute with than to gather, and be small beside the model. The
# block that a model repeats mostly is both. You say so with a *policy*, which is asked about each
# module: `ModuleWrapPolicy({Block})` says yes to blocks. Units may be inside of units. A parameter
# belongs to the innermost one around it, and what is in no block to the *root*, the model itself.


# %%
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight  # one parameter, as in many language models
        self.blocks = nn.Sequential(*(Block(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def forward(self, letters: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(letters)))


@on_ranks(2)
def units() -> None:
    model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}))
    seen: list[object] = []
    model.embed.register_forward_hook(lambda *_: seen.append(model.embed.weight))
    model(torch.arange(10)).sum().backward()
    if torch.distributed.get_rank() == 0:
        for unit in model.engine.units:
            print(unit.label, {info.name: len(info.owners) for info in unit.param_infos})
        kinds = [type(weight).__name__ for weight in (*seen, model.embed.weight)]
        print("embed.weight in the forward, and later:", *kinds)
        print(refusal(lambda: model.embed.weight.norm()))


# %% [markdown]
# The numbers count *owners*, modules that have the parameter. The root's only one has two. In the
# forward both see the same view of the flat tensor, and autograd adds up the gradients of the two
# uses. Later both see a *placeholder*: it has a shape, no values, and a message. Without it, a
# module that is called at the wrong time would compute with freed memory.
#
# {{ minifsdp/support/param_access.py ParamInfo.use_unsharded_views }}
#
# ## What breaks without it
#
# An embedding is large. Why should it not be a unit of its own? Then its weight would be in that
# unit's flat tensor, and the head's weight in the root's. The engine has two checks against this.
# Here they are taken away, and the model is trained, saved, and loaded into a plain one.


# %%
def loss(model: nn.Module, letters: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(letters), (letters + 1) % 10)  # the next letter


@on_ranks(2)
def embedding_apart() -> None:
    rank, alphabet, plain = torch.distributed.get_rank(), torch.arange(10), Model()
    for units, kinds in {"blocks": {Block}, "blocks, embedding": {Block, nn.Embedding}}.items():
        torch.manual_seed(0)
        with patch.multiple("minifsdp.wrapping.build", check_sharing=DEFAULT, set_unit=DEFAULT):
            model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy(kinds))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(20):
            loss(model, alphabet.chunk(2)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = loss(model, alphabet)
        plain.load_state_dict(model.state_dict())
        if rank == 0:
            print(f"units: {units}. loss {trained:.2f}, loaded {loss(plain, alphabet):.2f}")
    if rank == 0:
        print(refusal(lambda: FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy(kinds))))


# %% [markdown]
# Two weights that began as copies have parted. Training goes on as if nothing were wrong, and its
# loss is as good. But the plain model has one weight, keeps what it loads last, and is not the one
# that was trained. PyTorch's first FSDP (2.13) does just this, unless you pass
# `use_orig_params=True`; then the forward fails. minifsdp refuses, and changes nothing.
#
# ## Predict, then run
#
# 1. The whole model is one unit. How much does a rank send in a step, compared with DDP?
# 2. A block is called at two places of the model, and blocks are units. Is that refused?


# %%
@on_ranks(2)
def answers() -> None:
    model = FSDP(Model())
    loss(model, torch.arange(10)).backward()
    assert model.engine.stats.all_gathers == model.engine.stats.reductions == 1  # 1. as much:
    # a gather and a reduction, the halves of DDP's all-reduce; the root is not gathered twice
    block = Block(nn.Linear(4, 4))
    policy = ModuleWrapPolicy({Block})
    model = FSDP(nn.Sequential(block, nn.Tanh(), block), auto_wrap_policy=policy)
    assert len(model.engine.units) == 2  # 2. no: the root's, and that of one module


# %% [hidden]
def main() -> None:
    three_sizes()
    units()
    embedding_apart()
    answers()


if __name__ == "__main__":
    main()

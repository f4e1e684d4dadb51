"""Prefetch: python tutorials/12_prefetch.py; the page is 12_prefetch.md."""

# %% [markdown]
# # Prefetch: what to gather next, and when to ask
#
# On page [09](09_streams.md) communication is beside computation, and nobody had to see to that.
# Put four layers on two nodes, and look at the backward. It takes 16.7 ms: its computation and its
# communication, one after the other. They have streams of their own, and each waits for the other.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import Tensor, nn

from minifsdp import BackwardPrefetch, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import cluster
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Mistarget, Op
from minifsdp.sim.training.history import APPROACHES
from minifsdp.sim.views.timeline import svg

PICTURE, Layer = Path(__file__).with_suffix(".svg"), nn.TransformerEncoderLayer
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


# %%
def train(make, count=4, kind=Layer, cut=True, wrap=FSDP, **settings):
    with cluster(nodes=2) as gpu:
        module = make(*(kind(1024, 16) for _ in range(count)))
        model = wrap(module, auto_wrap_policy=ModuleWrapPolicy({Layer, nn.Sequential}), **settings)
        for _ in range(3):
            loss = model(torch.empty(64, 12, 1024)).mean()
            gpu.synchronize()
            if cut:
                gpu.step()  # pictures and figures are of what follows, the backward
            loss.backward()
            gpu.synchronize()
            gpu.step()
    return gpu.report(), gpu.tape, model.engine.prefetcher


def three_ways() -> None:
    tapes = {}
    for room in (1, 2):
        for way, when in (("none", None), ("POST", POST), ("PRE", PRE)):
            report, tape, _ = train(nn.Sequential, backward_prefetch=when, limit_all_gathers=room)
            tapes[f"a backward; prefetch: {way}, room for {room}"] = tape
            step, most = report["step"] * 1e3, report["peak reserved"] / 2**20
            asked = [op.label for op in last_step(tape)[0] if isinstance(op, Op) and op.sent]
            print(f"room for {room}, {way:4} {step:.1f} ms, {most:.0f} MiB: {', '.join(asked[:4])}")
    PICTURE.write_text(svg(dict([*tapes.items()][:2] + [*tapes.items()][-1:])))


# %% [markdown]
# ![Three timelines of a backward. Above, gathers, computation and reductions take turns. In the
# middle reductions are below computation; at the bottom gathers are, too.](12_prefetch.svg)
#
# The one thing to notice: what `compute` waits for. Above, a reduction and a gather; in the middle,
# a gather; below, nothing but the first. (Orange is the limiter; the last has room for two.)
#
# NCCL carries out the collectives of a group in the order in which the host launches them. With no
# prefetch, gather 2 is launched when needed, behind reduction 3, which waits for the backward of 3.
# So `compute` waits for both, with any room. (A forward has no reductions. A host that is ahead
# asks early enough.) In a backward somebody has to ask for 2 before reduction 3 is launched.
# `BACKWARD_PRE`, the default, does it before the backward of 3. Both are in memory then; with room
# for one it is declined. `BACKWARD_POST` asks when the host has freed 3. With room for one the host
# waits until `compute` has, too; with two it is far ahead, and POST as good as PRE. PyTorch
# ([#70235](https://github.com/pytorch/pytorch/pull/70235)), without a limiter then, saw 20 % less
# latency in 10 % more memory with PRE, less with POST. With such a model and room for two both save
# 16 % here ([table](../minifsdp/sim/README.md)).
#
# ## Which one is next?
#
# To ask ahead one has to know what comes. So the engine notes each turn, for the next step:
#
# {{ minifsdp/prefetch.py Order.visit }}
#
# A wrong guess changes no result, because a prefetch gathers early what would be gathered anyway.
# It costs memory or time. The target may be *already unsharded*: nothing is gathered ahead. Or *not
# needed yet*: what is needed queues behind it. Or *already resharded*: its turn is over.
#
# Four prefetchers have guessed from four orders. Here minifsdp has one after the other
# ([history.py](../minifsdp/sim/training/history.py)). `S` and `T` are units with two units inside:


# %%
class Nested(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        x = self.S(x)
        self.probe(x)  # and nothing comes of it
        return self.T(x)


def nested(a: Layer, b: Layer, probe: Layer, c: Layer, d: Layer) -> nn.Module:
    s, t = (nn.Sequential(nn.Linear(1024, 1024), *inside) for inside in ((a, b), (c, d)))
    return Nested({"S": s, "probe": probe, "T": t})


def approaches() -> None:
    for name, approach in APPROACHES.items():
        _, tape, orders = train(nested, 5, cut=False, wrap=approach.wrap)
        guess = orders.post_forward_order if name == "fairscale 2" else orders.pre_backward_order
        wrong = [f"{e.unit} {e.how}" for e in last_step(tape)[0] if isinstance(e, Mistarget)]
        print(f"{name:11} {' '.join(u.name for u in guess.last):26} {', '.join(wrong) or 'right'}")
    print("forward    ", *(unit.name for unit in orders.pre_forward_order.current))
    print("backward   ", *(unit.name for unit in orders.pre_backward_order.current))


# %% [markdown]
# The last two lines are what comes. **fairscale 1** took the forward's beginnings, reversed, for
# the backward. But `T` begins before the units inside it, both ways. So `T.2` is prefetched when
# `T` has to come first, and behind `T.1` a `T` that is in use. **fairscale 2** prefetched when a
# unit was freed. In the backward it did as minifsdp, in the forward it went by the ends: behind
# `S.2` that is `S`, in use, and behind `probe` it is `T.1`, before `T`. **PyTorch** takes the ends,
# reversed, for the backward. That is right for `T`, but no forward knows that the loss will not
# depend on `probe`. **minifsdp** takes the last backward, or PyTorch's guess if there was none.
#
# ## What breaks without it
#
# Two experts take turns, so that no backward is like the last. (It was 20.4 ms without prefetch.)


# %%
class Experts(nn.Sequential):
    turn = 0

    def forward(self, x: Tensor) -> Tensor:
        first, left, right, then, last = self
        self.turn += 1
        return last(then((left if self.turn % 2 else right)(first(x))))


def experts() -> None:
    for name in ("minifsdp", "PyTorch"):
        report, *_ = train(Experts, 5, wrap=APPROACHES[name].wrap)
        wrong = report["mistargeted prefetches"]
        print(f"{name:8} {report['step'] * 1e3:.1f} ms, mistargeted prefetches: {wrong}")
    assert train(Experts, 5, limit_all_gathers=3)[0]["step"] > 0.0190  # as much room as PyTorch


# %% [markdown]
# One expert is gathered for nothing, and stays until the backward ends. The other one was not in
# the last backward. It is gathered when it is needed, and so is what follows, which nobody knows.
# PyTorch guesses from the forward of this very step.
#
# ## Predict, then run
#
# 1. Without any limit, which of the three is faster than with room for two?
# 2. Each layer ends with `y.max().item()`. There is a `forward_prefetch=True`. What does it save?


# %%
class Asking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.max().item()
        return y


def answers() -> None:
    free = {"make": nn.Sequential, "limit_all_gathers": False}
    runs = [train(**free, backward_prefetch=way)[0]["step"] * 1e3 for way in (None, POST, PRE)]
    assert [round(ms, 1) for ms in runs] == [20.4, 16.1, 16.1]  # 1. none, but for 0.1 ms of PRE
    late = train(nn.Sequential, 4, Asking, False)[0]["step"]
    early = train(nn.Sequential, 4, Asking, False, forward_prefetch=True)[0]["step"]
    assert early < 0.93 * late  # 2. the host waits in each layer; now it asks for the next before
    print(f"2. {late * 1e3:.1f} ms without it, {early * 1e3:.1f} with it")


# %% [hidden]
def main() -> None:
    three_ways()
    approaches()
    experts()
    answers()


if __name__ == "__main__":
    main()

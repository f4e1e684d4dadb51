"""When to prefetch: python tutorials/12_prefetch.py; the page is 12_prefetch.md."""

# %% [markdown]
# # Prefetch: when to ask for the next gather
#
# On page [09](09_streams.md) gathers ran beside the computation, and nobody had to arrange it. Now
# take the GPT of `make demo`, eight times as wide and in bf16 (page [14](14_precision.md)), on two
# machines of eight GPUs, and look at its backward alone. It takes 15.2 ms. Its computation would
# take 10 ms, and its communication 5. They have streams of their own, and yet they take turns.
# **Why does nothing overlap, although the host is far ahead of the GPU?**

# %% [hidden]
from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import nn
from train_gpt import GPT, Block

from minifsdp import BackwardPrefetch, MixedPrecision, ModuleWrapPolicy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Op
from minifsdp.sim.views.timeline import table

PICTURE = Path(__file__).with_suffix(".svg")
WAYS = {
    "none": None,
    "POST": BackwardPrefetch.BACKWARD_POST,
    "PRE": BackwardPrefetch.BACKWARD_PRE,
}
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
ROOMS = {"room for 1": 1, "room for 2": 2, "any room": False}


# %%
@cache
def a_backward(way: str, room: int, hook: str = "") -> VirtualGpu:
    with cluster(nodes=2) as gpu:
        gpt = GPT(layers=4, width=1024)
        for block in gpt.blocks:
            HOOKS[hook](block)  # only used at the end of this page
        model = FSDP(
            gpt,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=BF16,
            backward_prefetch=WAYS[way],  # None, BACKWARD_POST or BACKWARD_PRE
            limit_all_gathers=room,  # units that may be unsharded at once; False: any number
        )
        for _ in range(3):
            loss = model(torch.zeros(96, 64, dtype=torch.long)).mean()
            gpu.synchronize()
            gpu.step()  # pictures and figures are of what follows, the backward
            loss.backward()
            gpu.synchronize()
            gpu.step()
    return gpu


def nine_ways() -> None:
    rows: dict[str, Any] = {}
    for name, room in ROOMS.items():
        for way in WAYS:
            gpu = a_backward(way, room)
            report, entries = gpu.report(), last_step(gpu.tape)[0]
            ms, mib = report["step"] * 1e3, report["peak reserved"] / 2**20
            rows.setdefault(name, {})[way] = gpu.tape, f"{ms:.1f} ms, {mib:.0f} MiB"
            sent = [
                op.label.replace("blocks.", "") for op in entries if isinstance(op, Op) and op.sent
            ]
            print(f"{name:10} {way:4} {ms:.1f} ms, {mib:.0f} MiB: {', '.join(sent[:4])}")
    PICTURE.write_text(table("A backward of four blocks: when the next gather is launched", rows))


# %% [markdown]
# The last column is what the network does first, in the order of the launches.
#
# ![Nine small timelines of a backward in three rows, for room for 1, 2 and any number of units, and
# three columns: without prefetch, POST and PRE. In the first column gather, computation and
# reduction of each block take turns in all rows, for 15.2 ms. Prefetched gathers are launched a
# block earlier; with room for two or more the computation follows without gaps in both other
# columns, in 11.9 or 11.8 ms. With room for one, POST takes 13.6 ms and PRE as long as
# none.](12_prefetch.svg)
#
# ## One queue for all collectives
#
# Look at the first column, at any room. Gather 2 runs after reduction 3, and reduction 3 needs the
# gradients that the backward of block 3 computes. So gather 2 runs when that backward is over, and
# the backward of block 2 waits for both of them. (A thin mark before a gather is the cast of the
# shard to bf16.)
#
# It is not that gather 2 is *launched* late. With any room the host has launched everything in the
# first milliseconds: follow the lines from the launches to the gathers. But NCCL, the library that
# communicates between GPUs, carries out the collectives of a group of GPUs one by one, **in the
# order in which the host launches them**. Without prefetch the host launches gather 2 when block 2
# needs it. By then it has launched reduction 3, and gather 2 has to queue behind it. It does not
# help that the host is ahead. In a forward it does, because no reduction is in the queue.
#
# The remedy: launch gather 2 before reduction 3. That is *backward prefetch*. There are two moments
# for it, and they are the names of the two modes.
#
# - **`BACKWARD_PRE`**: before the backward of block 3 is launched. Then gather 2 runs beside that
#   backward. Both blocks are in memory, so with room for one the limiter declines it.
# - **`BACKWARD_POST`**: when the host has launched the backward of block 3 and freed its
#   parameters, but before it launches reduction 3. With room for one the host first has to wait
#   until the GPU is done with block 3 (page [11](11_limiter.md)), so gather 2 runs beside no
#   computation, but before the reduction. With more room the host does not wait, gather 2 is
#   launched early as well, and POST is as good as PRE.
#
# {{ minifsdp/core/prefetch.py Prefetcher.pre_backward }}
#
# {{ minifsdp/core/prefetch.py Prefetcher.post_backward }}
#
# (How the target is found is the subject of page [13](13_targets.md).)
#
# ## How it came about
#
# - **November 2021.** A change to fairscale launches the gather of the previous layer when a
#   layer's backward is over ([#858](https://github.com/facebookresearch/fairscale/pull/858)).
#   Reductions are then "perfectly overlapped", and its author reports about 20 % more speed.
#   Launching it *before* the backward "doesn't seem to help further". A simpler version,
#   [#865](https://github.com/facebookresearch/fairscale/pull/865), was closed in February, because
#   fairscale had found another way: two *process groups* (lists of ranks that communicate) with the
#   same GPUs in both. Gathers use one and reductions the other, so that NCCL has two queues.
# - **December 2021.** PyTorch takes up the idea
#   ([#69282](https://github.com/pytorch/pytorch/pull/69282)), gathers before the backward, and
#   measures 20 % more speed and 10 % more memory.
#   [#70235](https://github.com/pytorch/pytorch/pull/70235) has both modes. With PRE the results are
#   best and stable. POST takes no more memory, but "did not see expected performance": what it
#   gathered was often not the next unit (page [13](13_targets.md)). There was no limiter yet, which
#   is the third row of the picture.
# - **June 2022.** The same for forwards ([#78841](https://github.com/pytorch/pytorch/pull/78841)),
#   for hosts that are *not* ahead: `forward_prefetch=True`.
# - **November 2022.** PRE is proposed as the default
#   ([#88428](https://github.com/pytorch/pytorch/pull/88428)), which it is today.
#
# Here PRE saves 22 % of the backward. For a RoBERTa of 1 GB in fp32 on a slow network like that of
# PyTorch's authors, the virtual GPU predicts that PRE saves 12 to 17 % of a whole step
# ([table](../minifsdp/sim/README.md)).
#
# ## What breaks without it
#
# `backward_prefetch=None` takes more than a quarter longer: 15.2 ms instead of 11.9. Few people set
# it. More common is this: you want to know where gradients vanish, and log their norm for each
# block.


# %%
def log_norms(block: nn.Module) -> None:
    def log(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        norms.append(grad_input[0].norm().item())  # the host waits for this number

    norms: list[float] = []
    block.register_full_backward_hook(log)


def logging() -> None:
    for way in WAYS:
        quiet, logged = (a_backward(way, 2, hook).report()["step"] * 1e3 for hook in ("", "log"))
        print(f"{way:4} {quiet:.1f} ms; with a norm logged for each block {logged:.1f} ms")


# %% [hidden]
def ask_for_maximum(block: nn.Module) -> None:
    block.register_forward_hook(lambda module, args, output: output.max().item() and None)


HOOKS = {"": lambda block: None, "log": log_norms}

# %% [markdown]
# With POST half of what prefetch saves is gone. The host waits for the norm of block 3, so it is
# not ahead any more when it frees block 3 and asks for the next gather. The GPU has nothing left to
# compute beside that gather. PRE asks before the backward begins, so the wait makes no difference
# to it. This is why PRE is the default: it does not depend on a host that is ahead.
#
# ## Predict, then run
#
# 1. With any room, `PRE` reserves more memory than with room for two. Does it save time?
# 2. Each block ends with `output.max().item()` in its *forward*. What can `forward_prefetch=True`
#    do about that?
# 3. Two process groups of all GPUs, one for gathers and one for reductions: which of the three
#    columns would that change?
#
# <details><summary>Answers</summary>
#
# 1. Hardly: 11.8 ms instead of 11.9. One gather ahead is enough to hide it, if a block's backward
#    takes longer than a gather.
# 2. The host is not ahead in this forward, so each gather is launched when its block is needed.
#    With forward prefetch it is launched before the previous block runs, so it is hidden: forward
#    and backward take 9 % less.
# 3. Where there is room for two or more, the first. Gather 2 would not queue behind reduction 3.
#    (The virtual GPU has one queue, as minifsdp and PyTorch use one group by default.)
#
# </details>


# %% [hidden]
def asking(forward_prefetch: bool) -> float:
    with cluster(nodes=2) as gpu:
        gpt = GPT(layers=4, width=1024)
        for block in gpt.blocks:
            ask_for_maximum(block)
        units = ModuleWrapPolicy({Block})
        settings = {"auto_wrap_policy": units, "mixed_precision": BF16}
        model = FSDP(gpt, forward_prefetch=forward_prefetch, **settings)
        for _ in range(3):
            model(torch.zeros(96, 64, dtype=torch.long)).mean().backward()
            gpu.synchronize()
            gpu.step()
    return gpu.report()["step"]


def answers() -> None:
    two, more = (a_backward("PRE", room).report() for room in (2, False))
    assert more["peak reserved"] > two["peak reserved"]  # 1. more memory, and hardly less time
    assert [f"{report['step'] * 1e3:.1f}" for report in (more, two)] == ["11.8", "11.9"]
    assert 0.9 < asking(True) / asking(False) < 0.92  # 2. the next gather is asked for earlier
    # 3. what is in the way of gather 2 is the reduction of 3, in all rows of the first column
    for room in ROOMS.values():
        entries = last_step(a_backward("none", room).tape)[0]
        sent = [op.label for op in entries if isinstance(op, Op) and op.sent]
        assert sent[1:3] == ["reduce 'blocks.3'", "all-gather 'blocks.2'"]


def main() -> None:
    nine_ways()
    logging()
    found = {
        name: [f"{a_backward(way, room).report()['step'] * 1e3:.1f}" for way in WAYS]
        for name, room in ROOMS.items()
    }
    assert found == {
        "room for 1": ["15.2", "13.6", "15.2"],
        "room for 2": ["15.2", "11.9", "11.9"],
        "any room": ["15.2", "11.9", "11.8"],
    }
    report = a_backward("none", 2).report()
    assert (round(report["compute"] * 1e3), round(report["communication"] * 1e3)) == (10, 5)
    post, pre = (a_backward(way, 2, "log").report()["step"] * 1e3 for way in ("POST", "PRE"))
    assert (f"{post:.1f}", f"{pre:.1f}") == ("13.6", "12.0")
    assert round(1 - 11.9 / 15.2, 2) == 0.22 and 1.25 < 15.2 / 11.9 < 1.3
    slow = "--model roberta-1gb --nodes 4 --network 100 --precision fp32 --batch 4 --seq 128 "
    none, same, pre = (
        simulate(parser().parse_args((slow + way).split())).report()["step"]
        for way in ("--backward none --limit 1", "--backward none --limit 2", "--limit 2")
    )
    assert (round(1 - pre / same, 2), round(1 - pre / none, 2)) == (0.12, 0.17)
    answers()


if __name__ == "__main__":
    main()

"""The rate limiter: python tutorials/11_limiter.py; the page is 11_limiter.md."""

# %% [markdown]
# # The limiter: a memory that filled up though nothing leaked
#
# In April 2022 a model of 175 billion parameters was trained with fairscale's FSDP. Tensors took at
# most 13 GB of a GPU, and PyTorch held 75. A change to fairscale made that 22
# ([fairscale#972](https://github.com/facebookresearch/fairscale/pull/972)). In July a comment there
# said which of its lines does it: when a layer is freed, the host waits for the GPU. That line took
# PyTorch's own FSDP, with a T5 of 8 billion, from 95 % of the memory to 47. But it frees nothing.
#
# You know enough to find out why it helps: the host is ahead of the GPU, and gathers run beside the
# computation (page [09](09_streams.md)); memory belongs to a stream (page [10](10_allocator.md)).
# That thread has a small program that shows it: a tensor of 16 MB is made, used and dropped, here
# twenty times. No two are ever alive at once.

# %% [hidden]
import warnings
from functools import cache
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import nn

from minifsdp import ModuleWrapPolicy
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.figures.report import ALL_GATHER, last_step
from minifsdp.sim.tape import Op
from minifsdp.sim.training.history import APPROACHES
from minifsdp.sim.views.timeline import svg
from minifsdp.streams import Streams


# %%
def twenty_tensors(made_on: str, line_of_2022: bool) -> None:
    with cluster() as gpu:
        for _ in range(20):
            with gpu.on(made_on):
                x = torch.empty(4_000_000)  # fp32: 16 MB
            gpu.clock.launch("compute", 0.01)  # the GPU is busy for 10 ms; the host goes on
            x.add_(1)
            gpu.record_stream(x, "compute")  # as x.record_stream(compute)
            del x
            if line_of_2022:  # torch.cuda.current_stream().synchronize()
                Streams.on(torch.device("meta")).compute.record_event().synchronize()
    reserved = gpu.allocator.reserved.peak // 2**20
    print(f"made on {made_on:7}, the host waits: {line_of_2022!s:5}  {reserved:3} MiB reserved")


# %% [markdown]
# On one stream the second tensor gets the memory of the first. What is launched on a stream
# happens in order, so the GPU will be done with the first before it touches the second.
#
# On two streams that is not so. The host has dropped the first tensor, but the compute stream, 10
# ms behind, will still read it, and the other stream would not wait for that. So this memory cannot
# be given out again before the read *has happened*. The allocator takes fresh memory, and again, as
# long as the host is ahead. If the host waits each time, one tensor's memory is enough.
#
# With FSDP the tensor is a layer's gathered parameters: made on the `unshard` stream, read by
# `compute`. Here are 24 layers, 1.3 billion parameters, on 32 GPUs.

# %%
RUN = "--model gpt-1.3b --nodes 4 --batch 4 --seq 512 --recompute full --limit "


@cache
def step(words: str) -> VirtualGpu:
    return simulate(parser().parse_args(words.split()))


def with_and_without() -> None:
    tapes = {f"gpt-1.3b, 4 x 8 a100-40, limit {n}": step(RUN + n).tape for n in ("none", "2")}
    Path(__file__).with_suffix(".svg").write_text(svg(tapes))
    for limit in ("none", "2"):
        report, (tape, start, _) = step(RUN + limit).report(), last_step(step(RUN + limit).tape)
        last = [op for op in tape if isinstance(op, Op) and op.name == ALL_GATHER][24]  # of 0 to 24
        mib, units = report["peak reserved"] / 2**20, report["peak unsharded units"]
        print(f"limit {limit:4}  {report['step'] * 1e3:.0f} ms, {units:2} units alive", end=", ")
        times = " ms, over at ".join(f"{(t - start) * 1e3:.1f}" for t in (last.launched, last.end))
        print(f"{mib:5,.0f} MiB; the forward's last gather: launched at {times}")


# %% [markdown]
# ![Two timelines of the same step, with purple gathers in the same places. Above, without a limit,
# gray reserved memory fills its box. Below, with a limit of two, the host's lane is full of orange
# waits, and the gray area is half as high.](11_limiter.svg)
#
# The one thing to notice: gathers *run* at nearly the same times in both, as fast as the network
# lets them. But their memory is taken when the host *launches* them. Above, a forward's are all
# launched in 3 ms, 65 before the last is over; below, orange, the host waits until there is room.
# That costs no time here. (The third unit below is the model itself, around its layers. 48 above
# are more than there are: the backward gathers some before the GPU is done with their forward.)
#
# ## How long to wait
#
# The line of 2022 waits for all that was launched on one stream, `compute`, which is then idle
# until the host launches more. PyTorch waits for less. When a layer is freed it records an *event*,
# behind the last kernel that reads the layer. Before another gather it waits for the event of the
# layer before the last. minifsdp counts what is alive. (A prefetch is not `needed`.)
#
# {{ minifsdp/limiter.py EventQueue.admit }}
#
# ## What breaks without it
#
# Now 7 billion parameters on 64 GPUs, and a batch that nearly fills them:

# %%
LARGE = "--model gpt-7b --nodes 8 --network 3200 --batch 8 --seq 512 --limit "
SMALL = "--model gpt-125m --batch 1 --seq 512 --limit "


def when_memory_ends() -> None:
    for limit in ("none", "2"):
        gpu = step(LARGE + limit)
        ms, mib = gpu.report()["step"] * 1e3, gpu.allocator.reserved.peak / 2**20
        print(f"limit {limit:4}  {ms:,.0f} ms, {mib:,.0f} MiB, {gpu.allocator.retries} retries")


# %% [markdown]
# Without the limit memory runs out. Before PyTorch gives up it returns all that it has cached to
# the driver, waits for the device and tries again: the waiting that one wanted to avoid. PyTorch's
# people measured 38.8 GB and 247.6 ms without, 8.0 GB and 236.5 ms with it
# ([pytorch#98354](https://github.com/pytorch/pytorch/pull/98354)), and 938 of 6,784 MB less for a
# T5 ([#83666](https://github.com/pytorch/pytorch/pull/83666)). The virtual GPU comes near these
# bytes, but a step of its T5 takes 147 ms, theirs 3.4 s ([why](../minifsdp/sim/README.md)). The
# limiter became the default, with room for two layers, says the documentation. Count them:


# %%
def layers_alive(name: str) -> None:
    with cluster() as gpu:
        layers, alive = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12))), []
        model = APPROACHES[name].wrap(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        for _ in range(3):
            loss = model(torch.empty(8192, 4096)).sum()
            gpu.step()
            alive.append(gpu.report()["peak unsharded units"])  # of the forward alone
            loss.backward()
            gpu.step()
    print(f"{name:8}  in the first three forwards: {alive}")


# %% [markdown]
# Before a gather PyTorch waits for the oldest event, if there are two or more. A step's last ones
# remain. So in the next step the oldest is of a layer further back, and a third one fits in.
#
# ## Predict, then run
#
# 1. `SHARD_GRAD_OP` keeps parameters from forward to backward. What does the limit change then?
# 2. What does a limit of 1 cost, where a layer may only be gathered when the last one is done with?
# 3. And one of 2 on a small model, whose kernels are as short as their launches?


# %%
def answers() -> None:
    kept = [step(f"{SMALL} {limit} --strategy shard_grad_op") for limit in ("none", "2")]
    assert len({gpu.allocator.reserved.peak for gpu in kept}) == 1  # 1. nothing
    one, two = (step(RUN + limit).report()["step"] for limit in "12")
    assert one > 1.5 * two  # 2. no gather is hidden behind the layer before
    limited, free = (step(SMALL + limit).report()["step"] for limit in ("2", "none"))
    assert limited > 1.05 * free  # 3. now the GPU does wait for the host


# %% [hidden]
def main() -> None:
    twenty_tensors("compute", line_of_2022=False)
    twenty_tensors("unshard", line_of_2022=False)
    twenty_tensors("unshard", line_of_2022=True)
    with_and_without()
    when_memory_ends()
    layers_alive("PyTorch")
    layers_alive("minifsdp")
    answers()


if __name__ == "__main__":
    main()

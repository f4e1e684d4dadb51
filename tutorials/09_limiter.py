"""The rate limiter: python tutorials/09_limiter.py; the page is 09_limiter.md."""

# %% [markdown]
# # The limiter: a memory that filled up and nobody knew why
#
# In July 2022 the people who trained the largest models with fairscale's FSDP had a problem. Each
# GPU held a few percent of the model and gathered one layer at a time. Yet 95 % of its memory was
# taken. Then somebody added one line that made the host wait for the GPU each time a layer was
# freed, and it was 47 %. The line computes nothing and frees nothing, and at first nobody could
# say why it helped ([fairscale#972](https://github.com/facebookresearch/fairscale/pull/972)).
#
# You know enough to find out. The host is ahead of the GPU, and gathers run beside the computation
# (page [07](07_streams.md)); and memory belongs to a stream (page [08](08_allocator.md)). This is
# the smallest program that shows it: a tensor of 16 MB is made, used and dropped, twenty times. No
# two are ever alive at once.

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
from minifsdp.sim.history import APPROACHES
from minifsdp.sim.run import simulate
from minifsdp.sim.timeline import svg


# %%
def twenty_tensors(made_on: str, line_of_2022: bool) -> None:
    with cluster() as gpu:
        for _ in range(20):
            with gpu.on(made_on):
                x = torch.empty(4_000_000)  # fp32: 16 MB
            gpu.clock.launch("compute", 0.01)  # the GPU is busy for 10 ms; the host goes on
            x.add_(1)
            gpu.record_use(x, "compute")  # as x.record_stream(compute)
            del x
            if line_of_2022:
                gpu.synchronize()
    reserved = gpu.allocator.reserved.peak // 2**20
    print(f"made on {made_on:7}, the host waits: {line_of_2022!s:5}  {reserved:3} MiB reserved")


# %% [markdown]
# On one stream the second tensor gets the memory of the first. What is launched on a stream
# happens in order, so the GPU will be done with the first before it touches the second.
#
# On two streams that is not so. The host has dropped the first tensor, but the compute stream,
# which is 10 ms behind, will still read it, and the other stream would not wait for that. The
# allocator cannot give this memory out again before the read *has happened*. So it takes fresh
# memory; and again, and again, as long as the host is ahead. Not one byte is leaked. When the host
# waits after each tensor, the read has happened, and one tensor's memory is enough.
#
# With FSDP the tensor is a layer's gathered parameters: made on the `unshard` stream, read by
# `compute`. Here are 24 layers, 1.3 billion parameters, on 32 GPUs.

# %%
RUN = "--model gpt-1.3b --nodes 4 --batch 4 --seq 512 --recompute yes --limit "


@cache
def step(words: str) -> VirtualGpu:
    return simulate(parser().parse_args(words.split()))


def with_and_without() -> None:
    tapes = {f"gpt-1.3b, 4 x 8 a100-40, limit {n}": step(RUN + n).tape for n in ("none", "2")}
    Path(__file__).with_suffix(".svg").write_text(svg(tapes))
    for limit in ("none", "2"):
        report = step(RUN + limit).report()
        ms, reserved = report["step"] * 1e3, report["peak reserved"] / 2**20
        units = report["peak unsharded units"]
        print(f"limit {limit:4}  {ms:.0f} ms, {units:2} units alive, {reserved:5,.0f} MiB reserved")


# %% [markdown]
# ![Two timelines of the same step. Above, without a limit, all purple gathers of the forward are
# close together at the start, and gray reserved memory fills its box. Below, with a limit of two,
# the host's lane is full of orange waits, and the gray area is half as high.](09_limiter.svg)
#
# The one thing to notice: above, the `unshard` lane and the host's are done with the forward long
# before `compute` is; below, orange, the host waits until there is room. What `compute` does is
# the same. It was never short of work, so keeping the host back costs nothing. (The third unit
# below is the model itself, around its layers. The 29 above are more than there are, because the
# backward gathers some again before the GPU is done with their forward.)
#
# ## How long to wait
#
# fairscale's line waits for *everything*. Afterwards the host is not ahead at all, and the GPU has
# nothing to do until the next kernel has been launched. PyTorch waits for less. When a layer is
# freed it records an *event*, behind the last kernel that reads the layer. Before another gather
# it waits for the event of the layer before the last. minifsdp counts what is alive. (A prefetch is
# not `needed`, only a good idea.)
#
# {{ minifsdp/limiter.py EventQueue.admit }}
#
# ## What breaks without it
#
# Now 7 billion parameters on 64 GPUs, and a batch that nearly fills them; then a T5 of 500 million.

# %%
LARGE = "--model gpt-7b --nodes 8 --network 3200 --batch 8 --seq 512 --limit "
T5 = "--model t5-500m --nodes 2 --batch 16 --seq 128 --limit "
SMALL = "--model gpt-125m --batch 1 --seq 512 --limit "


def when_memory_ends() -> None:
    for run in (LARGE, T5):
        for limit in ("none", "2"):
            gpu = step(run + limit)
            ms, reserved = gpu.report()["step"] * 1e3, gpu.allocator.reserved.peak / 2**20
            retries = gpu.allocator.retries
            print(f"limit {limit:4}  {ms:5,.0f} ms, {reserved:6,.0f} MiB, {retries} retries")


# %% [markdown]
# Without the limit memory runs out. Before PyTorch gives up it returns all that it has cached to
# the driver, waits for the device and tries again: the waiting that one wanted to avoid. On a real
# A100 it was 38.8 GB and 247.6 ms without, 8.0 GB and 236.5 ms with it
# ([pytorch#98354](https://github.com/pytorch/pytorch/pull/98354)), and for a T5 on 16 of them 938
# of 6,784 MB less ([#83666](https://github.com/pytorch/pytorch/issues/83666)). It became the
# default, with room for two layers at once, says the documentation. Nobody seems to have counted:


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
# PyTorch's events are in a queue. If there are two in it, the host waits for the older one before
# another gather. The last ones of a step stay there, and nobody waits for them. So in the next step
# the older one is older than it should be, and a third layer fits in.
#
# ## Predict, then run
#
# 1. `SHARD_GRAD_OP` keeps parameters from forward to backward. What does the limit change then?
# 2. What does a limit of 1 cost, where a layer may only be gathered when the last one is done with?
# 3. And one of 2 on a small model, whose kernels are as short as their launches?


# %%
def answers() -> None:
    kept = [step(f"{SMALL} {limit} --strategy shard_grad_op") for limit in ("none", "2")]
    assert len({gpu.allocator.reserved.peak for gpu in kept}) == 1  # 1. nothing: nothing is freed
    one, two = (step(RUN + limit).report()["step"] for limit in "12")
    assert one > 1.6 * two  # 2. no gather is hidden behind the layer before
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

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
# This page finds out. You need three facts from the pages before. The host only *launches* work and
# is far ahead of the GPU. Gathers run on a stream of their own, beside the computation. And memory
# belongs to the stream that it was allocated on.
#
# ## The smallest program that shows it
#
# A tensor of 16 MB is made, used and dropped, twenty times; no two are ever alive at once. It is
# run on minifsdp's virtual GPU, whose allocator works as PyTorch's does.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch

from minifsdp.sim import cluster
from minifsdp.sim.__main__ import parser
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.run import simulate
from minifsdp.sim.timeline import svg

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def twenty_tensors(made_on: str, line_of_2022: bool) -> int:
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
    return gpu.allocator.reserved.peak // 2**20


def toy() -> None:
    print("made and used on one stream: ", twenty_tensors("compute", False), "MiB reserved")
    print("made on one, used on another:", twenty_tensors("unshard", False), "MiB")
    print("the same, and the host waits:", twenty_tensors("unshard", True), "MiB")


# %% [markdown]
# On one stream the second tensor gets the memory of the first. What is launched on a stream
# happens in order, so the GPU will be done with the first before it touches the second.
#
# On two streams that is not so. The host has dropped the first tensor, but the compute stream,
# which is 10 ms behind, will still read it, and the other stream would not wait for that. The
# allocator cannot give this memory out again before the read *has happened*. So it takes fresh
# memory; and again, and again, as long as the host is ahead. Not one byte is leaked. It all waits
# to be free.
#
# When the host waits after each tensor, the read has happened, and one tensor's memory is enough.
#
# ## The same in a training step
#
# With FSDP the tensor is a layer's gathered parameters: made on the `unshard` stream, read by
# `compute`. Here are 24 layers, 1.3 billion parameters, on 32 GPUs.

# %%
RUN = "--model gpt-1.3b --nodes 4 --batch 4 --seq 512 --recompute yes --limit "


def step(words: str) -> VirtualGpu:
    return simulate(parser().parse_args(words.split()))


def with_and_without() -> None:
    steps = {limit: step(RUN + limit) for limit in ("none", "2")}
    title = "gpt-1.3b, 4 x 8 a100-40, limit"
    PICTURE.write_text(svg({f"{title} {limit}": gpu.tape for limit, gpu in steps.items()}))
    for limit, gpu in steps.items():
        report = gpu.report()
        print(
            f"limit {limit:4}  {report['step'] * 1e3:.0f} ms,"
            f" {report['peak unsharded units']:2} units alive at once,"
            f" {report['peak reserved'] / 2**20:5,.0f} MiB reserved"
        )


# %% [markdown]
# ![Two timelines of the same step. Above, without a limit, all purple gathers of the forward are
# close together at the start, and the gray area of reserved memory fills its box. Below, with a
# limit of two, the host's lane is full of orange waits, and the gray area is half as
# high.](09_limiter.svg)
#
# The one thing to notice: above, the `unshard` lane and the host's are done with the forward long
# before `compute` is; below, orange, the host waits until there is room. What `compute` does is
# the same. It was never short of work, so keeping the host back costs nothing.
#
# (The model itself is a unit too, around its layers, and alive all the while: that is the third one
# below. The 29 above are more than there are layers, because the host has begun to launch the
# backward, which gathers them again, before the GPU has freed them once.)
#
# ## How long to wait
#
# fairscale's line waits for *everything*: afterwards the host is not ahead at all, and the GPU
# has nothing to do until the next kernel has been launched. PyTorch waits for less. When a layer is
# freed it records an *event*: a mark in the compute stream behind the last kernel that reads the
# layer. Before another gather it waits for the mark of the layer before the last. The host stays
# ahead, by one layer. minifsdp's is the same idea, and counts what is alive:
#
# {{ minifsdp/limiter.py EventQueue.admit }}
#
# (A prefetch is not `needed`, only a good idea. It may be declined.)
#
# ## What breaks without it
#
# Now the same GPUs have 40 GB, and the model has 30 billion parameters.

# %%
LARGE = "--model gpt-30b --nodes 64 --network 3200 --batch 2 --seq 512 --recompute yes --limit "


def when_memory_ends() -> None:
    for limit in ("none", "2"):
        gpu = step(LARGE + limit)
        report, allocator = gpu.report(), gpu.allocator
        print(
            f"limit {limit:4}  {report['step'] * 1e3:,.0f} ms,"
            f" {allocator.reserved.peak / 1e9:.1f} GB reserved,"
            f" had to flush and ask again {allocator.retries} times"
        )


# %% [markdown]
# Without the limit memory runs out. Before PyTorch gives up it returns all that it has cached to
# the driver, waits for the device and tries again. The step is slower, and it was the waiting
# that the missing limit was supposed to avoid. PyTorch measured the same on a real A100: 38.8 GB
# and 247.6 ms without, 8.0 GB and 236.5 ms with it
# ([pytorch#98354](https://github.com/pytorch/pytorch/pull/98354)). It has been on by default since.
#
# ## Predict, then run
#
# 1. `SHARD_GRAD_OP` keeps parameters from forward to backward. What does the limit change then?
# 2. What does a limit of 1 cost, where a layer may only be gathered when the last one is done with?
# 3. And on a small model, whose kernels are as short as their launches?


# %%
def answers() -> None:
    kept = [step(f"{RUN} {limit} --strategy shard_grad_op").report() for limit in ("none", "2")]
    assert kept[0]["peak reserved"] == kept[1]["peak reserved"]  # 1. nothing: nothing is freed
    one, two = (step(RUN + limit).report()["step"] for limit in "12")
    assert one > 1.1 * two  # 2. no gather is hidden behind the layer before
    small = "--model gpt-125m --batch 1 --seq 512 --limit "
    times = [step(small + limit).report()["step"] for limit in ("2", "none")]
    assert times[0] > 1.02 * times[1]  # 3. now the GPU does wait for the host
    print("1. nothing")
    print(f"2. {one / two:.2f} times the step")
    print(f"3. {times[0] / times[1]:.2f} times the step with the limit: here it costs something")


# %% [hidden]
def main() -> None:
    toy()
    with_and_without()
    when_memory_ends()
    answers()


if __name__ == "__main__":
    main()

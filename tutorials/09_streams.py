"""Streams: python tutorials/09_streams.py; the page is 09_streams.md."""

# %% [markdown]
# # Streams: a product that took no time
#
# On a GPU you multiply two matrices of 8,192 by 8,192, which is 1.1 trillion operations, and read
# the clock before and after that line. It took 6 millionths of a second. You do not believe it, so
# you print a number of the result, and the `print` takes 5 thousandths. What did you time?

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import MixedPrecision, ModuleWrapPolicy
from minifsdp.core.streams import Streams
from minifsdp.sim import VirtualGpu, cluster

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def a_product() -> None:
    with cluster(cuda_malloc=0) as gpu:  # what memory costs is on page 10
        x = torch.empty(8192, 8192, dtype=torch.bfloat16)
        y = x @ x
        print(f"{gpu.clock.now * 1e3:6.3f} ms, the product is behind us")
        y[0, 0].item()
        print(f"{gpu.clock.now * 1e3:6.3f} ms, and we know a number")


# %% [markdown]
# `y = x @ x` computes nothing. A function that runs on the GPU is a *kernel*, and this line
# *launches* one: it puts the kernel into a queue and returns a tensor whose numbers do not exist
# yet. The *host*, your Python program, goes on, while the GPU takes kernels from the queue one by
# one. The host waits only if it asks for a value, as `.item()` and `print` do, if it is told to
# wait (below), or if the queue is full.
#
# These times are from minifsdp's *virtual GPU*. It sees every operator that torch runs, on tensors
# without values, and asks how long it would take on an A100. A kernel takes the longer of two
# times: that of its arithmetic, in bf16 at 66 % of the data sheet's speed at most, and that of its
# bytes, at 83 %. To launch it takes the host 6 microseconds. Of [published
# runs](../minifsdp/sim/README.md) that it was not fitted to, half are within 6 % of what it says.
# The engine runs on it as it is. When a kernel is launched, it is already clear when it will run,
# and on the virtual GPU this is all that a stream is:
#
# {{ minifsdp/sim/hardware/clock.py Clock._start }}
#
# ## Two queues
#
# Such a queue is a *stream*, and there can be several. Kernels of one stream run one after the
# other. Two streams run beside each other, unless one is told to wait for an *event* of the other:
# a mark in a stream that is passed when all that was launched on this stream before it is done. The
# host can be told to wait for an event, too. Here are three kernels, of 3, 2 and 1 seconds. When
# does each of them run?


# %%
def two_streams(wait: bool) -> None:
    with cluster() as gpu:
        streams = Streams.on(torch.device("meta"))
        a = gpu.clock.launch("unshard", 3.0)
        if wait:
            streams.compute.wait_event(streams.unshard.record_event())
        b = gpu.clock.launch("compute", 2.0)
        c = gpu.clock.launch("unshard", 1.0)
        ahead = gpu.clock.now
        streams.compute.record_event().synchronize()
        print(f"wait: {wait!s:5}  a {a}  b {b}  c {c}  host {ahead}, after b {gpu.clock.now}")


# %% [markdown]
# The host stays at second 0 until it waits for `b` itself, because the order to wait for `a` goes
# into the queue like everything else. And `b` does not wait for `c`, which was launched after the
# mark.
#
# On a real GPU the same lines are these. `x.record_stream` is for the allocator, page
# [10](10_allocator.md):
#
# ```python
# side, compute = torch.cuda.Stream(), torch.cuda.current_stream()
# with torch.cuda.stream(side):  # what is launched inside runs on `side`
#     x = torch.ones(8192, 8192, device="cuda")
# compute.wait_event(side.record_event())  # the GPU's compute stream waits; the host does not
# y = x @ x
# x.record_stream(compute)
# ```
#
# (`compute.wait_stream(side)` is short for the event and the wait.)
#
# ## Reading a step
#
# FSDP has three streams: `compute`, `unshard` for all-gathers, `reduce` for reduce-scatters. (Later
# pages add three more.) Here is a step of four layers, each a unit, on 8 GPUs:


# %%
def a_step() -> VirtualGpu:
    with cluster() as gpu:
        module = nn.Sequential(*(nn.TransformerEncoderLayer(1024, 16) for _ in range(4)))
        units = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        bf16 = MixedPrecision(param_dtype=torch.bfloat16)  # page 14; limit_all_gathers: page 11
        model = FSDP(module, auto_wrap_policy=units, mixed_precision=bf16, limit_all_gathers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            gpu.phase("forward")  # phases are for the picture
            loss = model(torch.empty(512, 4, 1024)).mean()
            gpu.phase("backward")
            loss.backward()
            gpu.phase("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            gpu.synchronize()  # the host waits, as it would in loss.item()
            gpu.step()  # pictures and figures are of the last one
    return gpu


def timeline() -> None:
    gpu = a_step()
    gpu.timeline(PICTURE, "a step of four layers, 8 x a100-40")
    for name in ("step", "other host stalls", "compute", "overlap", "exposed communication"):
        print(f"{name:21} {gpu.report()[name] * 1e3:.1f} ms")


# %% [markdown]
# ![A timeline of a step. The host launches eight gathers in the first quarter and waits from a
# third on, amber. On the unshard lane gathers 0 to 3 run at the start, then 3, 2, 1 and 0 again.
# The compute lane is busy with 0, 1, 2, 3, 3, 2, 1, 0 from the end of the first gather on.
# Reductions 3, 2, 1, 0 run below the backward, but for the last. Memory is below, with its peak
# marked.](09_streams.svg)
#
# Each of the four layers has a colour, in all lanes. Of 1.0 ms of communication (lanes `unshard`
# and `reduce`) 0.8 are beside computation. They cost little time: a kernel beside a collective is a
# sixth slower. The rest, at both ends, is *exposed*: the computation has to wait for it.
#
# - **host**: it launches all of forward, backward and optimizer in the first third of the step. A
#   coloured tick is the launch of a gather, with a thread to where it runs. Amber: it waits (`other
#   host stalls`).
# - **unshard**: gathers 0 to 3. Then 3 again, which was freed after its forward, and 2, 1, 0.
# - **compute**: waits for gather 0. Then it waits for hardly anything: when it is done with 0, 1
#   is there. A backward takes about twice as long as its forward.
# - **reduce**: the gradient of 3 is reduced beside the backward of 2. That of 0 has nothing to hide
#   behind, and the optimizer, the sliver at the right, has to wait for it.
# - **memory**: as the host takes and frees it, ahead of the GPU (page [10](10_allocator.md)).
#
# Gathers and reductions never run beside each other, although they are in two streams. NCCL, the
# library that communicates, carries out the collectives of a group of GPUs one by one, in the order
# of the host's calls. Page [12](12_prefetch.md) is about what follows from that.
#
# ## What breaks without it
#
# All this depends on a few waits. This one comes just before a unit is used. Take it away:
#
# {{ minifsdp/core/unshard.py wait_for_unshard }}


# %%
def without_the_wait() -> None:
    with patch("minifsdp.core.engine.wait_for_unshard"):  # it is called, and nothing happens
        gpu = a_step()
    print(f"step {gpu.report()['step'] * 1e3:.1f} ms", gpu.races()[0], sep="\n")


# %% [markdown]
# The step is faster, and nothing has failed. On a real GPU `addmm`, the first product of layer 0,
# computes with what was in that memory before. But if compute happens to be busy just then, the
# gather is there in time and all is right. So the numbers are wrong only now and then.
#
# The virtual GPU notices it every time. It knows what each kernel reads and writes, and who was
# told to wait for what. If two kernels use the same memory and at least one of them writes, a
# stream or a wait has to put one before the other. If nothing does, it is a *race*, whenever they
# happen to run.
#
# On a CPU the engine is the same, and the compute stream is the host. What it submits to `unshard`
# is a function that *starts* a gather, in threads of the network library, and returns a second one,
# which waits for its end. A GPU is given both at once. A CPU runs the second when somebody waits
# for the event, and computes in between ([streams.py](../minifsdp/core/streams.py)).
#
# (Between ranks on one machine there is no network whose time could be hidden. There the second
# function copies the data from the memory of the other ranks:
# [same_machine.py](../minifsdp/comm/same_machine.py).)
#
# ## Predict, then run
#
# 1. If all of the engine's streams were one, how long would the step take?
# 2. The wait is missing, but gathers take no time at all. Is it a race?
#
# <details><summary>Answers</summary>
#
# 1. 6.4 ms, hardly more than its computation and its communication added up: nothing would run
#    beside anything else.
# 2. Yes. Nothing says which of the two comes first; they only came out that way.
#
# </details>


# %% [hidden]
def answers() -> None:
    report = a_step().report()
    with patch("minifsdp.sim.streams.STREAMS", ("compute",) * 6):
        step = a_step().report()["step"]  # 1. the sum
    assert step > report["compute"] + report["communication"] and f"{step * 1e3:.1f}" == "6.4"
    at_once = patch("minifsdp.sim.hardware.costs.Cluster.ring_seconds", return_value=0.0)
    with at_once, patch("minifsdp.core.engine.wait_for_unshard"):
        assert a_step().races()  # 2. yes


# %% [hidden]
def main() -> None:
    report = a_step().report()
    hidden, all_of_it = report["overlap"], report["communication"]
    assert (f"{all_of_it * 1e3:.1f}", f"{hidden * 1e3:.1f}") == ("1.0", "0.8")
    gpu = a_step().cluster.gpu
    assert (round(2 * 8192**3 / 1e12, 1), gpu.products, gpu.passes) == (1.1, 0.66, 0.83)
    assert a_step().cluster.beside_collectives == 0.84  # a sixth slower
    assert round(2 * 8192**3 / (gpu.flops * gpu.products) * 1e3) == 5  # ms, of the product
    a_product()
    two_streams(wait=False)
    two_streams(wait=True)
    timeline()
    without_the_wait()
    answers()


if __name__ == "__main__":
    main()

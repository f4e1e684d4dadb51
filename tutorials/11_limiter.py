"""The rate limiter: python tutorials/11_limiter.py; the page is 11_limiter.md."""

# %% [markdown]
# # The limiter: memory that filled up though nothing leaked
#
# In April 2022 a model of 175 billion parameters was trained with fairscale's FSDP on 1,024 A100.
# Its log said that tensors never took more than 13.4 GB of a GPU, yet PyTorch held 75.4 GB. After a
# small change PyTorch held 22.1 GB, and training was 2 % faster, which its author thought might be
# chance ([fairscale#972](https://github.com/facebookresearch/fairscale/pull/972)). The change
# gathered parameters earlier, and it had the host wait for the GPU whenever a layer was freed.
#
# In July a comment there reported which of the two had helped. In PyTorch's own FSDP, with a T5 of
# 8 billion parameters, the wait alone took the reserved memory from 95 % of the GPU to 47 %. A line
# that waits frees nothing. **How can waiting save memory?** Write down what you think.
#
# You have what it takes to find out. The host is ahead of the GPU, and gathers run beside the
# computation (page [09](09_streams.md)). A block of memory belongs to a stream, and what another
# stream may still read is not given out again (page [10](10_allocator.md)). The thread has a small
# program that puts these together. It makes a tensor of 16 MB, uses it and drops it, here twenty
# times. No two of the tensors are ever alive at once.

# %% [hidden]
import re
import warnings
from functools import cache
from pathlib import Path

from draw import time_line

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.core.limiter import NoLimit
from minifsdp.core.streams import Streams
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.figures.report import ALL_GATHER, last_step
from minifsdp.sim.tape import Op
from minifsdp.sim.training.history import APPROACHES
from minifsdp.sim.views.timeline import svg

PICTURE = Path(__file__).with_suffix(".svg")


# %%
def twenty_tensors(made_on: str, host_waits: bool) -> int:
    with cluster() as gpu:
        for _ in range(20):
            with gpu.on(made_on):
                x = torch.empty(4_000_000)  # fp32: 16 MB
            gpu.clock.launch("compute", 0.01)  # the GPU is busy for 10 ms; the host goes on
            x.add_(1)
            gpu.record_stream(x, "compute")  # as x.record_stream(compute)
            del x
            if host_waits:  # as torch.cuda.current_stream().synchronize()
                Streams.on(torch.device("meta")).compute.record_event().synchronize()
    reserved = gpu.allocator.reserved.peak // 2**20
    print(f"made on {made_on:7}, the host waits: {host_waits!s:5}  {reserved:3} MiB reserved")
    return reserved


# %% [markdown]
# **On one stream** the second tensor gets the memory of the first. Work on a stream runs in the
# order in which it was launched, so the GPU is done with the first tensor before it touches the
# second.
#
# **On two streams** that is not so. The host has dropped the first tensor, but the compute stream
# is 10 ms behind and will still read it. The other stream would not wait for that. So the allocator
# cannot give out this memory until the read *has happened*, and takes fresh memory instead. It does
# so again and again, as long as the host is ahead of the GPU.
#
# **If the host waits** after each tensor, the read has happened when the next tensor is made, and
# one tensor's memory is enough. The wait frees nothing; it lets the GPU catch up.
#
# ## The same with layers
#
# In FSDP such a tensor is a layer's gathered parameters: made on the `unshard` stream, read by
# `compute`, and freed by the host as soon as it has launched the layer's forward. Here is a GPT
# with 24 layers and 1.3 billion parameters on 32 GPUs. `--limit` is how many units may be unsharded
# at once; `none` lets the host run ahead.

# %%
RUN = "--model gpt-1.3b --nodes 4 --batch 4 --seq 512 --recompute full --limit "


@cache
def step(words: str) -> VirtualGpu:
    return simulate(parser().parse_args(words.split()))


def with_and_without() -> None:
    tapes = {f"gpt-1.3b, 4 x 8 a100-40, limit {n}": step(RUN + n).tape for n in ("none", "2")}
    PICTURE.write_text(svg(tapes, part=0.5))
    for limit in ("none", "2"):
        report, (tape, start, _) = step(RUN + limit).report(), last_step(step(RUN + limit).tape)
        last = [op for op in tape if isinstance(op, Op) and op.name == ALL_GATHER][24]  # of 0 to 24
        mib, units = report["peak reserved"] / 2**20, report["peak unsharded units"]
        print(f"limit {limit:4}  {report['step'] * 1e3:.0f} ms, {units:2} units alive", end=", ")
        times = " ms, over at ".join(f"{(t - start) * 1e3:.1f}" for t in (last.launched, last.end))
        print(f"{mib:5,.0f} MiB; the forward's last gather: launched at {times}")


# %% [markdown]
# ![Two timelines of the first half of a step of 213 ms. A thread goes from the launch of each
# gather on the host's lane to where it runs. Above, without a limit, all threads begin in the first
# 10 ms and fan out over the step; 7.1 GiB are reserved. Below, with a limit of two, the host's lane
# is full of orange waits and each thread is short; 2.7 GiB are reserved. The gathers themselves run
# at the same times.](11_limiter.svg)
#
# Follow the threads from the host's lane to the gathers. A gather *runs* when the network gets to
# it, and that moment is nearly the same in both pictures. But its memory is taken when the host
# *launches* it. Above, the host launches a whole forward's gathers in 3 ms, 65 ms before the last
# of them is over. Below, it waits (orange) until there is room. That costs no time here, because
# the network is as busy as before. (Below, the third unit is the model itself, around its layers.
# The 48 above are more than the model has, because the backward gathers some of them again before
# the GPU is done with their forward.)
#
# ## How long to wait
#
# fairscale's line waits for *everything* that was launched on the compute stream. Then the GPU has
# nothing left to do until the host has launched more. Readers of the thread feared that this would
# slow down small models.
#
# PyTorch waits for less ([#83666](https://github.com/pytorch/pytorch/pull/83666)). When the host
# frees a unit it records an *event* on the compute stream, behind the last kernel that reads the
# unit, and puts it into a queue. Before another gather it takes the oldest event from the queue and
# waits for that one. So the host stays about one unit ahead, and the GPU has work. Here is that
# queue as our simulator runs it, on minifsdp's engine:
#
# {{ minifsdp/sim/training/history.py DriftingQueue.admit }}
#
# `admit` is called before each gather and returns whether the gather may be launched. For a
# prefetch, the subject of page [12](12_prefetch.md), `needed` is false.
#
# ## Count them
#
# PyTorch's documentation says that its limiter allows for the memory of [two
# units](https://docs.pytorch.org/docs/stable/fsdp.html): the one that computes, and the next. Here
# are twelve layers of equal size. How many are alive at once in the first three forwards?
# (`fairscale 1` and `fairscale 2` are fairscale's two attempts of 2022, numbers 3 and 4 of the
# story below. Both wait for everything.)


# %%
def five_ways(name: str) -> tuple[list[int], float]:
    wrap, settings = FSDP, {"limit_all_gathers": NoLimit()}
    if name in APPROACHES:
        wrap, settings = APPROACHES[name].wrap, {}
    with cluster() as gpu:
        layers, alive = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12))), []
        model = wrap(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **settings)
        for _ in range(3):
            loss = model(torch.empty(8192, 4096)).sum()
            gpu.step()
            alive.append(gpu.report()["peak unsharded units"])  # of the forward alone
            loss.backward()
            gpu.step()
    mib, stalls = gpu.allocator.reserved.peak / 2**20, gpu.report()["host stalls in the limiter"]
    print(f"{name:12} {alive!s:13} units alive, {mib:5,.0f} MiB reserved", end="; ")
    print(f"in a backward the host waits for {stalls * 1e3:.0f} ms")
    return alive, mib


# %% [markdown]
# With PyTorch's queue two are alive in the first forward, and three from then on. At the end of a
# step units are freed and nothing is gathered, so their events stay in the queue. In the next step
# the oldest event belongs to a unit further back, and a third unit fits in. (The first version
# emptied the whole queue when it waited; [#86165](https://github.com/pytorch/pytorch/pull/86165)
# made it take one event at a time, expecting the same memory.) minifsdp counts the units that are
# alive instead of events, so a limit holds in every step, here `limit_all_gathers=2`
# ([limiter.py](../minifsdp/core/limiter.py)).
#
# Which is better, two or three? While the host waits until the device has freed a unit, it queues
# nothing that the device could do next. So the third unit that PyTorch's queue lets in by accident
# makes steps shorter by up to 5 % ([a table](../minifsdp/sim/README.md)). minifsdp's default,
# `limit_all_gathers=True`, lets it in on purpose, and from the first step on: two units that the
# host has not freed yet, and a third one that the host has freed and the device has not. It is
# `--limit true` on a command line, and the default there, too.
#
# FSDP2 is in the table, too. It needs no limiter and its host never waits, because it does not use
# `record_stream`. Instead its *streams* wait for each other. So each block of memory is used in the
# order of one stream, and the allocator may give it out at once. Page [26](26_rows.md) shows how.
#
# ## The whole story
#
# ![A line of dates from November 2021 to November 2023, with thirteen entries. Blue: prefetch,
# first in fairscale, then in PyTorch. Orange: limiters, from fairscale's wait in April 2022 to
# PyTorch's default in July 2023. Green: streams that wait for each other, proposed in August 2023
# and taken up by FSDP2 in November.](11_limiter_history.svg)
#
# 1. **[fairscale#865](https://github.com/facebookresearch/fairscale/pull/865)** gathered ahead in
#    the backward, by the reversed order of the forward (page [12](12_prefetch.md)). Gathers and
#    reductions no longer took turns. For its first form
#    ([#858](https://github.com/facebookresearch/fairscale/pull/858)) a gain of about 20 % was
#    reported. It was closed in 2022, because fairscale had chosen two process groups instead.
# 2. **[pytorch#70235](https://github.com/pytorch/pytorch/pull/70235)** brought `BACKWARD_PRE` and
#    `BACKWARD_POST`. With PRE its authors measured 20 % more speed and 10 % more memory. POST
#    gained less, because it often gathered the wrong unit (page [13](13_targets.md)). The host
#    still ran ahead.
# 3. **[fairscale#972](https://github.com/facebookresearch/fairscale/pull/972)** prefetched in the
#    forward, too, and had the host wait at every free: 22.1 GB instead of 75.4. On another cluster
#    the speed was reported to rise from 1,700 words per second to 3,200. The wait is longer than it
#    has to be. It was not merged.
# 4. **[fairscale#1052](https://github.com/facebookresearch/fairscale/pull/1052)** recorded a second
#    order and prefetched *after* the free, so that one unit is alive where the PR before it has two
#    (see the counts above). It had trouble with recomputation, and was not merged. Its thread ends
#    with the advice to use CUDA events.
# 5. **[pytorch#83666](https://github.com/pytorch/pytorch/pull/83666)** did that, with an event for
#    each free and an argument `all_gather_issue_limit`. A T5 on 16 GPUs is reported to have taken
#    5,846 MB instead of 6,784, in equal time. But users had one more number to choose.
# 6. **[pytorch#83917](https://github.com/pytorch/pytorch/pull/83917)** turned that number into a
#    switch, `limit_all_gathers`. Two units are "an empirically chosen constant", and other numbers
#    showed no improvement. It was off by default.
# 7. **[pytorch#86165](https://github.com/pytorch/pytorch/pull/86165)** takes one event at a time
#    from the queue. The host waits for less time, but from the second step on three units fit in,
#    as counted above.
# 8. **[pytorch#98354](https://github.com/pytorch/pytorch/pull/98354)** tried to wait only if
#    something was to be gathered. Its baseline is the clearest measurement that was published: 38.8
#    GB and 247.6 ms without the limiter, 8.0 GB and 236.5 ms with it. The change itself made that
#    10.9 GB, presumably because the wait had held back reductions, too. It was not merged.
# 9. **[pytorch#104900](https://github.com/pytorch/pytorch/pull/104900)** made it the default, and
#    gave the wait its name in profiles. A program whose host is hardly ahead loses some time
#    (question 3).
# 10. **[pytorch#108234](https://github.com/pytorch/pytorch/pull/108234)** proposed that the
#     *stream* waits instead of the host, because 235 microseconds went by between the end of a wait
#     and the gather. The FSDP1 of torch 2.13 still has the host wait.
# 11. **[FSDP2](https://github.com/pytorch/pytorch/issues/114299)** has streams wait for each other,
#     and no `record_stream`. Its memory does not depend on how far ahead the host is. The price is
#     a copy of each unit (page [26](26_rows.md)).
#
# ## What breaks without it
#
# Here are seven billion parameters on 32 GPUs, which have 40 GB each, and then 16:


# %%
LARGE = "--model gpt-7b --nodes 4 --network 3200 --batch 1 --seq 512 --recompute full "
SMALL = "--model gpt-125m --batch 1 --seq 512 --limit "


def when_memory_ends() -> None:
    for words in ("--limit none", "--limit 2", "--limit none --memory 16", "--limit 2 --memory 16"):
        gpu = step(LARGE + words)
        ms, gib = gpu.report()["step"] * 1e3, gpu.allocator.reserved.peak / 2**30
        print(f"{words:24} {ms:,.0f} ms, {gib:4.1f} GiB reserved, {gpu.allocator.retries} retries")


# %% [markdown]
# Without the limiter the step takes 3.5 times the memory. On the larger GPU nothing else happens,
# and nobody notices until the batch grows. On the smaller one memory runs out. Before PyTorch gives
# up, it returns everything that it has cached to the driver, waits for the device, and asks again.
# This is a *retry* (`num_alloc_retries` in `torch.cuda.memory_stats()`). So the host waits after
# all, and the step takes 13 % longer. A user who met this
# ([pytorch#104509](https://github.com/pytorch/pytorch/issues/104509)) reports that the limiter
# brought the retries to zero. The factor of almost two that was reported in fairscale's thread does
# not show here, because a retry on the virtual GPU costs only the wait and the calls to the driver.
#
# In a profile of a real run you can see the rate limiter at work. PyTorch and minifsdp record the
# wait under the same name, minifsdp only where the host has to wait:
#
# ```python
# with torch.profiler.profile() as profile:
#     model(batch).sum().backward()
# waits = [e for e in profile.events() if e.name == "FullyShardedDataParallel.rate_limiter"]
# print(len(waits), "waits,", sum(e.cpu_time_total for e in waits) / 1e3, "ms")
# ```
#
# ## Predict, then run
#
# 1. `SHARD_GRAD_OP` keeps parameters from forward to backward. What does the limit change then?
# 2. With a limit of 1, a unit is gathered only when the GPU is done with the one before. What does
#    that cost?
# 3. What does a limit of 2 cost on a small model, whose kernels are as short as their launches?
#
# <details><summary>Answers</summary>
#
# 1. Nothing: all units have to be in memory at the end of the forward anyway.
# 2. No gather is hidden behind the computation of the unit before. In the run above the step takes
#    more than one and a half times as long.
# 3. The step is more than 5 % longer. The host needs all its time to launch kernels, and now it
#    waits for the GPU at each unit. This is the case for which PyTorch's documentation says to turn
#    the limiter off.
#
# </details>


# %% [hidden]
def answers() -> None:
    kept = [step(f"{SMALL} {limit} --strategy shard_grad_op") for limit in ("none", "2")]
    assert len({gpu.allocator.reserved.peak for gpu in kept}) == 1  # 1. nothing
    one, two = (step(RUN + limit).report()["step"] for limit in "12")
    assert one > 1.5 * two  # 2. no gather is hidden
    limited, free = (step(SMALL + limit).report()["step"] for limit in ("2", "none"))
    assert limited > 1.05 * free  # 3. the GPU waits for the host


EVENTS = """
2021-11-19 blue    fairscale#865   gathers ahead in the backward; closed for another way
2021-12-21 blue    pytorch#70235   BACKWARD_PRE and BACKWARD_POST: 20 % faster, 10 % more memory
2022-04-11 orange  fairscale#972   prefetch, and a wait at every free: 75.4 GB become 22.1
2022-07-22 orange  fairscale#972   in a comment: the wait alone does it, 95 % become 47 % (reported)
2022-08-03 orange  fairscale#1052  two recorded orders; trouble with recomputation
2022-08-18 orange  pytorch#83666   an event for each free; all_gather_issue_limit
2022-08-23 orange  pytorch#83917   limit_all_gathers: two units, off by default
2022-10-03 orange  pytorch#86165   waits for one event at a time, where it emptied the queue
2023-04-04 orange  pytorch#98354   38.8 GB without, 8.0 GB with the limiter
2023-07-10 orange  pytorch#104900  on by default; rate_limiter in profiles
2023-08-29 blue    pytorch#108190  BACKWARD_POST gathers the wrong unit (open)
2023-08-30 green   pytorch#108234  the stream waits, not the host; not so in FSDP1
2023-11-21 green   FSDP2           streams wait for each other: no limiter
"""


def main() -> None:
    events = [line.split(maxsplit=3) for line in EVENTS.strip().splitlines()]
    title = "From prefetch (blue) to the limiter (orange) to none (green); days of first posts"
    time_line(PICTURE.with_stem("11_limiter_history"), title, events)
    found = [twenty_tensors("compute", False), twenty_tensors("unshard", False)]
    assert [*found, twenty_tensors("unshard", True)] == [16, 320, 16]
    with_and_without()
    ways = {name: five_ways(name) for name in ("no limiter", *APPROACHES)}
    assert [ways[n][0] for n in ("PyTorch", "minifsdp")] == [[2, 3, 3], [2, 2, 2]]
    assert ways["no limiter"][1] > 2.4 * ways["FSDP2"][1]
    when_memory_ends()
    without, limited = (step(LARGE + words).report() for words in ("--limit none", "--limit 2"))
    assert 3.4 < without["peak reserved"] / limited["peak reserved"] < 3.6
    assert round(without["peak reserved"] / limited["peak reserved"], 1) == 3.5
    assert {step(words + "2").cluster.world_size for words in (RUN, LARGE + "--limit ")} == {32}
    assert round(67.8 - 2.8) == 65  # ms, as printed
    small = step(LARGE + "--limit none --memory 16").report()["step"]
    assert 1.12 < small / step(LARGE + "--limit 2 --memory 16").report()["step"] < 1.14
    answers()
    named = set(re.findall(r"\[((?:fairscale|pytorch)#\d+|FSDP2)\]", Path(__file__).read_text()))
    assert named - {"pytorch#104509"} == {e[2] for e in events} - {"pytorch#108190"}


if __name__ == "__main__":
    main()

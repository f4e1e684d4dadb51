"""Offload: python tutorials/17_offload.py; the page is 17_offload.md."""

# %% [markdown]
# # Offload: parameters that live on the host
#
# A GPT of 7 billion parameters, and one GPU: there is nobody to shard with. In fp32 parameters and
# gradients take 54 GB, and Adam's averages as much again. The GPU has 40. The machine around it has
# 256. But PCIe between them moves 25 GB/s, where the GPU's own memory moves 1,555.
#
# With `CPUOffload` a unit's chunk is in the host's memory. So are its gradient and the optimizer's
# state, and the optimizer steps there, on the CPU. Before a unit is gathered its chunk is uploaded,
# and after a gradient is reduced it is downloaded. Each has a stream of its own, so that it runs
# beside the computation and, since the link goes both ways at once, beside the other.

# %% [hidden]
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from torch import nn

from minifsdp import CPUOffload, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.reduce import Reduction
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.tape import Op
from minifsdp.sim.training.models import Block, next_token
from minifsdp.sim.training.presets import MODELS

OFFLOAD = CPUOffload(offload_params=True)


# %%
def train(name: str, offload: Any, batch: int = 1, gpus: int = 1, **settings: Any) -> VirtualGpu:
    with torch.device("meta"):  # no memory yet: page 18
        module, policy = MODELS[name].build(), ModuleWrapPolicy({Block})
    with cluster("a100-40", gpus_per_node=gpus) as gpu:
        model = FSDP(module, auto_wrap_policy=policy, cpu_offload=offload, **settings)
        gpu.step()
        next_token(model, batch, 512).backward()
        gpu.step()
    return gpu


def gigabytes(gpu: VirtualGpu, what: str) -> float:
    copies = [op for op in gpu.tape if isinstance(op, Op) and op.label.startswith(what)]
    return sum(buffer.nbytes for copy in copies for buffer in copy.reads) / 1e9


def seven_billion() -> None:
    try:
        train("gpt-7b", offload=None)
    except torch.OutOfMemoryError:
        print("without offload: out of memory")
    gpu = train("gpt-7b", OFFLOAD)
    peak, seconds = gpu.report()["peak allocated"] / 1e9, gpu.report()["step"]
    up, down = gigabytes(gpu, "upload"), gigabytes(gpu, "download")
    print(f"with it: at most {peak:.1f} GB; {up:.0f} GB up, {down:.0f} GB down, {seconds:.2f} s")
    title = "7 billion parameters on one GPU of 40 GB: forward and backward of 512 tokens"
    gpu.timeline(Path(__file__).with_suffix(".svg"), title)


# %% [markdown]
# ![A timeline. The upload lane is nearly full, the download lane is in the second half. The compute
# lane has gaps between all its boxes in the first half, and none in the second.](17_offload.svg)
#
# The one thing to notice is the upload lane, which is hardly ever idle. (To the right is virtual
# time, a box is a unit, below is memory.) A layer has 805 MB. The link brings them in 32 ms, at
# 80 % of its nominal speed. The forward computes with them for 24 ms, then it waits for the next.
# The backward computes for 48 ms, so the link has time to spare. The download is in nobody's way,
# except for the last pieces, which come when there is nothing left to compute.
#
# {{ minifsdp/offload.py upload }}
#
# `non_blocking` lets the host go on. For that its memory has to be *pinned*: the GPU fetches it by
# address, and the system may move or swap out any other. From such memory CUDA copies to a pinned
# buffer of its own first, and the host waits for that. So on a real GPU minifsdp pins chunks and
# gradients when they are made. The rest of the machine cannot have that memory, used or not.
#
# ## When it is worth it
#
# When nothing else fits, and the batch is large. A copy takes as long for any batch; computing does
# not. Here are 1.3 billion parameters, which fit both ways, and the optimizer's step:


# %%
def batches() -> None:
    for batch in (1, 4):
        for offload in (None, OFFLOAD):
            report = train("gpt-1.3b", offload, batch).report()
            seconds, peak = report["step"], report["peak allocated"] / 1e9
            name = "offload" if offload else "without"
            print(f"{512 * batch:4} tokens, {name}: {seconds:.2f} s, at most {peak:4.1f} GB")


def adam_on_the_host() -> None:
    with cluster("a100-40") as gpu:
        param = nn.Parameter(torch.zeros(1_000_000, device="cpu"))
        param.grad = torch.zeros_like(param)
        optimizer = torch.optim.AdamW([param], fused=True)
        optimizer.step()
        before = gpu.clock.now
        optimizer.step()
        seconds, gb = (gpu.clock.now - before) * 6_700, 4 * 4 * 6.7  # four numbers, of 4 bytes
        print(f"Adam for 6.7 billion: {seconds:.1f} s, {gb:.0f} GB at {gb / seconds:.0f} GB/s")


# %% [markdown]
# Adam goes through four numbers for each parameter. A machine's memory moves 300 GB/s here, for
# eight GPUs, so that each one's process has an eighth of it, and Adam takes longer than all the
# rest. (ZeRO-Offload has an Adam for CPUs, which gets the most out of it.) A larger batch, or
# several before one step (page [20](20_no_sync.md)), take no longer.
#
# ## What breaks without it
#
# At the end of a backward the last gradients are on their way. Without offload the host does not
# wait for them: it tells the GPU to, and goes on. But now it is the host that needs them:
#
# {{ minifsdp/reduce.py wait_for_reduction }}
#
# Leave out the case for offload, and ask the virtual GPU what it thinks:


# %%
def only_the_gpu_waits(reduction: Reduction) -> None:
    reduction.event.wait()


def too_early() -> None:
    with cluster() as gpu, patch("minifsdp.gradients.wait_for_reduction", only_the_gpu_waits):
        model = FSDP(nn.Linear(8, 8), cpu_offload=OFFLOAD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
    print(*gpu.races(), sep="\n")


def moved_by_hand() -> None:
    with cluster():
        model = FSDP(nn.Linear(8, 8), cpu_offload=OFFLOAD)
        model.to(torch.get_default_device())  # the virtual GPU, which calls itself "meta"
        try:
            model(torch.ones(8))
        except RuntimeError as error:
            print(error)


# %% [markdown]
# The optimizer's `add_` reads a gradient that may not be there yet, and writes to a chunk that may
# still be on its way up; one wait stands for both. (Both are in what `empty` gave: host memory.) On
# a real GPU it would step with garbage, on some days. The last line above is about a habit,
# `model.to(device)`. It would bring everything to the GPU after all, and so it is refused.
#
# ## Predict, then run
#
# 1. On eight GPUs instead of one, how much does each of them upload?
# 2. And with `NO_SHARD`, where every rank has everything, but keeps it for the backward?


# %%
def answers() -> None:
    one, eight = (train("gpt-125m", OFFLOAD, gpus=gpus) for gpus in (1, 8))
    assert gigabytes(eight, "upload") == gigabytes(one, "upload") / 8  # 1. an eighth: its chunk
    whole = train("gpt-125m", OFFLOAD, gpus=8, sharding_strategy=ShardingStrategy.NO_SHARD)
    times = gigabytes(whole, "upload") / gigabytes(eight, "upload")
    assert 4 < times < 8  # 2. everything, though only once: 4.8 times as much


# %% [hidden]
def main() -> None:
    seven_billion()
    batches()
    adam_on_the_host()
    too_early()
    moved_by_hand()
    answers()


if __name__ == "__main__":
    main()

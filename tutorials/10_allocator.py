"""The caching allocator: python tutorials/10_allocator.py; the page is 10_allocator.md."""

# %% [markdown]
# # The caching allocator: why reserved is not allocated
#
# `nvidia-smi` says that your GPU is full. You add up your tensors, and they take a third of it.
# Both are right. Between your tensors and the GPU is PyTorch's *caching allocator*. Asking the
# driver for memory takes as long as a hundred small kernels, giving it back waits for the whole
# device, and a training step makes thousands of tensors. So the allocator keeps what is freed, for
# the next tensor that fits. And it has three answers to "how much?":
#
# - **allocated**: memory that tensors live in;
# - **reserved**: memory that PyTorch has asked the driver for, and not given back;
# - **active**: allocated, and what was freed but may still be read. This page is about that one.
#
# The page runs on minifsdp's virtual GPU, whose allocator has PyTorch's default rules and numbers.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch

from minifsdp.core.streams import Finish, Streams
from minifsdp.sim import VirtualGpu, cluster

PICTURE, MiB = Path(__file__).with_suffix(".svg"), 2**20


# %%
def asked_and_taken() -> None:
    with cluster() as gpu:
        for _ in range(1000):
            torch.empty(250_000)  # made, and dropped at once
    print(f"1000 tensors, {gpu.allocator.mallocs} cudaMalloc")
    for size in (1, 1_000_000, MiB + 1, 16_000_000):
        with cluster() as gpu:
            tensor = torch.empty(size, dtype=torch.uint8)
            allocated, reserved = gpu.allocator.allocated.now, gpu.allocator.reserved.now
            print(f"{size:>10,} bytes: {allocated:>10,} allocated, {reserved:>10,} reserved")
            del tensor


# %% [markdown]
# The driver is asked for *segments*, and tensors get *blocks* of them, in multiples of 512 bytes.
# Blocks of up to 1 MiB come from segments of 2 MiB, larger ones from 20 MiB. From 10 MiB on, a
# block gets a segment of its own, in multiples of 2 MiB. What is left of that segment is split off
# only if it is more than 1 MiB, so the last tensor has 16,777,216 bytes. A block is one piece: if
# ten tensors of 2 MiB fill a segment and every second one is dropped, 10 MiB are free, but not for
# a tensor of 4 MiB. That is *fragmentation*.
#
# PyTorch has a remedy that is off by default: `PYTORCH_ALLOC_CONF=expandable_segments:True` (older
# versions call the variable `PYTORCH_CUDA_ALLOC_CONF`). Then a stream has one segment for its small
# blocks and one for its large ones. A segment grows at its end by *pages*, of 2 or of 20 MiB, which
# may be anywhere in the GPU's memory, and free blocks beside each other become one. The virtual GPU
# has it, too (`--alloc`). Here are twenty tensors, one after the other, each larger than the one
# before, as activations may be when sentences have different lengths:


# %%
def growing(alloc: str) -> int:
    with cluster(alloc=alloc) as gpu:
        for i in range(20):
            tensor = torch.empty((20 + i) * MiB, dtype=torch.uint8)  # 20 to 39 MiB
            del tensor
    reserved = gpu.allocator.reserved.peak // MiB
    print(f"{alloc or 'default':26} {reserved:3} MiB reserved; never more than 39 allocated")
    return reserved


# %% [markdown]
# By default a block that is too small is of no use for the next tensor, and a new segment is asked
# for. An expandable segment grows by the pages that are missing.
#
# ## Whose memory it is
#
# A block that was freed on the host may still be in use on the GPU, which is behind. For the *same
# stream* this does no harm: its next kernel runs after those that were launched before. So a freed
# block goes back to the pool of its stream, at once, and no other stream gets it as long as PyTorch
# keeps it.
#
# What if another stream has read it? Then the allocator has to be told, with
# `tensor.record_stream(stream)`. When the tensor is freed, an event is recorded on that stream.
# Until the event is passed, the block is neither allocated nor free, but still *active*. The
# allocator looks whether the event is passed only when the next tensor is allocated.


# %%
def copy_of(streams: Streams, name: str) -> torch.Tensor:
    """16 MB, made on another stream; the compute stream waits for it."""
    made = []

    def launch() -> Finish:
        made.append(torch.ones(4_000_000))
        return lambda: None

    streams.unshard.submit(launch, f"copy {name}").wait()
    return made[0]


def levels(gpu: VirtualGpu, when: str) -> None:
    allocated, active = gpu.allocator.allocated.now / MiB, gpu.allocator.active.now / MiB
    print(f"{when:30} {allocated:3.0f} MiB allocated, {active:3.0f} active")


def freed_and_not_free() -> None:
    with cluster() as gpu:
        streams, busy = Streams.on(torch.device("meta")), torch.empty(8192, 8192)
        x = copy_of(streams, "x")
        torch.matmul(busy, busy)  # 59 ms of work for the compute stream
        x.add_(1)
        levels(gpu, "x is in use:")
        streams.compute.record_stream(x)  # x.record_stream(compute)
        del x
        levels(gpu, "x is dropped:")
        gpu.synchronize()
        levels(gpu, "the GPU has done everything:")
        y = copy_of(streams, "y")
        levels(gpu, "y, of the same size, is made:")
        del y


# %% [markdown]
# (`busy` has 256 MiB.) Only `y` gets the memory of `x`. Next come six such copies, one after the
# other, with and without `record_stream`. The host does not wait, and no two of the copies are
# alive at once:


# %%
def six_copies(record: bool) -> VirtualGpu:
    with cluster() as gpu:
        streams, busy = Streams.on(torch.device("meta")), torch.empty(2048, 2048)
        for name in "abcdef":
            x = copy_of(streams, name)
            for _ in range(2):
                torch.matmul(busy, busy)
            x.add_(1)
            if record:
                streams.compute.record_stream(x)
            del x
        gpu.synchronize()
    return gpu


def with_and_without() -> None:
    six_copies(record=True).timeline(PICTURE, "six copies of 16 MB, one after the other")
    for record in (True, False):
        gpu = six_copies(record)
        races = gpu.races()
        print(f"record_stream: {record}. {gpu.allocator.reserved.now // MiB} MiB reserved")
        print(*races[:1], sep="\n")


# %% [markdown]
# ![A timeline. The unshard lane makes six copies at the start, the compute lane works on them until
# the end. The reserved and active areas rise in six steps and stay; the allocated one stays low, at
# most 48 MiB.](10_allocator.svg)
#
# At the end of the six copies there is memory for six, though never more than one was alive.
# *Allocated* (dark green) is what the program means. *Active* (light green) is what the GPU is not
# done with. *Reserved* (gray) is what it costs, and what `nvidia-smi` shows, beside some hundred MB
# of CUDA's own.
#
# Without `record_stream` one block is enough, and that is what breaks: the next copy is written to
# it while the GPU has yet to read the last one. On a real GPU this gives wrong numbers now and
# then. The virtual one knows what every kernel reads and writes, and reports it every time.
#
# In minifsdp a unit's parameters are made on one stream and read on another, too:
#
# {{ minifsdp/core/reshard.py reshard }}
#
# ## Predict, then run
#
# 1. A tensor of 3 bytes and one of 600: how much is allocated?
# 2. A tensor is dropped on one stream. The host waits for the GPU. Then another stream asks for the
#    same size. Does it get that memory?
#
# <details><summary>Answers</summary>
#
# 1. 512 and 1,024 bytes: multiples of 512.
# 2. No: what is cached belongs to the stream that it was allocated on. Only when the GPU is full,
#    or when the program calls `torch.cuda.empty_cache()`, does all that is cached go back to the
#    driver. Then any stream can have it.
#
# </details>


# %% [hidden]
def answers() -> None:
    with cluster() as gpu:
        two = torch.empty(3, dtype=torch.uint8), torch.empty(600, dtype=torch.uint8)
        assert gpu.allocator.allocated.now == 512 + 1024  # 1.
        del two
    with cluster() as gpu:
        torch.empty(4_000_000)
        gpu.synchronize()
        with gpu.on("unshard"):
            torch.empty(4_000_000)
        torch.empty(1_000_000), torch.empty(2_000_000)  # these two are cut from the first one's
        assert gpu.allocator.mallocs == 2  # 2. no: what is cached belongs to its stream
        for stream in ("compute", "unshard"):
            with gpu.on(stream):
                torch.empty(30 * 2**30, dtype=torch.uint8)
        assert gpu.allocator.retries == 1  # but when memory ends, the cache goes to the driver


# %% [hidden]
def main() -> None:
    with cluster() as gpu:
        busy = torch.empty(8192, 8192)
        torch.matmul(busy, busy)
        assert round((gpu.clock.idle_at() - gpu.clock.now) * 1e3) == 59  # ms, as the comment says
    asked_and_taken()
    assert growing("") > 5 * growing("expandable_segments:True")
    freed_and_not_free()
    with_and_without()
    answers()


if __name__ == "__main__":
    main()

"""Offload: python tutorials/17_offload.py; the page is 17_offload.md."""

# %% [markdown]
# # Offload: parameters that live on the host
#
# You have a GPT of 7 billion parameters and one GPU, so there are no other ranks to shard with. It
# should compute in bf16, but the parameters that the optimizer changes are in fp32 (page
# [14](14_precision.md)). They and their gradients take 54 GB, and the two averages of Adam as much
# again. The GPU has 40. But the *host*, the computer around the GPU, has a memory of its own, which
# is usually larger. The two are connected by a *PCIe* link. It moves 25 GB/s in each direction,
# while the GPU's own memory moves 1,555 GB/s. Can one train like that?
#
# With `CPUOffload` a unit has its place in the host's memory, and only visits the GPU:
#
# 1. Its shard, the gradient of its shard and the optimizer's state are on the host.
# 2. Before the unit is gathered, its shard is copied to the GPU. This is the *upload*.
# 3. After its gradient is reduced, the result is copied to the host. This is the *download*.
# 4. The optimizer steps on the host, with the CPU.
#
# Uploads and downloads have a stream each (page [09](09_streams.md)). So they run while the GPU
# computes and, as the link goes both ways at once, also at the same time as each other. How long
# does the GPU wait for them?

# %% [hidden]
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from taken_out import call, stage, three_times
from torch import nn
from train_gpt import GPT
from train_gpt import Block as DemoBlock

from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.reduce import Reduction
from minifsdp.offload import Download
from minifsdp.sim import VirtualGpu, cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.tape import Op
from minifsdp.sim.training.models import Block, next_token
from minifsdp.sim.training.presets import MODELS

PICTURE = Path(__file__).with_suffix(".svg")
OFFLOAD = CPUOffload(offload_params=True)


# %%
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def train(name: str, offload: Any, tokens: int, gpus: int = 1, **settings: Any) -> VirtualGpu:
    with torch.device("meta"):  # tensors without memory: page 18
        module, policy = MODELS[name].build(), ModuleWrapPolicy({Block})
    settings = {"auto_wrap_policy": policy, "mixed_precision": BF16, **settings}
    with cluster("a100-40", gpus_per_node=gpus) as gpu:
        model = FSDP(module, cpu_offload=offload, **settings)
        gpu.step()
        next_token(model, max(tokens // 2048, 1), length=min(tokens, 2048)).backward()
        gpu.step()
    return gpu


def gigabytes(gpu: VirtualGpu, what: str) -> float:
    copies = [op for op in gpu.tape if isinstance(op, Op) and op.label.startswith(what)]
    return sum(buffer.nbytes for copy in copies for buffer in copy.reads) / 1e9


def seven_billion() -> None:
    try:
        train("gpt-7b", offload=None, tokens=512)
    except torch.OutOfMemoryError:
        print("without offload: out of memory")
    for tokens in (512, 2048, 8192):
        gpu = train("gpt-7b", OFFLOAD, tokens)
        report, up, down = gpu.report(), gigabytes(gpu, "upload"), gigabytes(gpu, "download")
        print(f"{tokens:4} tokens: {report['step']:.2f} s, of which it computes "
              f"{report['compute']:.2f}; {up:.0f} GB up, {down:.0f} GB down; "
              f"at most {report['peak allocated'] / 1e9:.1f} GB")  # fmt: skip
    draw(gpu)


# %% [hidden]
def draw(gpu: VirtualGpu) -> None:
    title = "7 billion parameters on one GPU of 40 GB: forward and backward of 8,192 tokens"
    gpu.timeline(PICTURE, title)
    ops = [op for op in gpu.tape if isinstance(op, Op)]
    (upload, _) = (op for op in ops if op.label == "upload 'blocks.14'")
    starts = [min(op.start for op in ops if op.stream == "compute" and reads(op, f"blocks.{n}"))
              for n in (14, 15)]  # fmt: skip
    forward = sum(op.end - op.start for op in ops
                  if op.stream == "compute" and starts[0] <= op.start < starts[1])  # fmt: skip

    of_gpu = GPUS["a100-40"]
    assert upload.reads[0].nbytes // 10**6 == 805 and round((upload.end - upload.start) * 1e3) == 32
    assert round(forward * 1e3) == 18 and round(of_gpu.pcie * 0.8 / 1e9) == 25
    assert round(2 * 4 * 6.7) == 54 and of_gpu.bandwidth == 1555e9
    down = [op for op in ops if op.label.startswith("download 'blocks")]
    assert round((down[9].end - down[8].end) * 1e3) == 38  # the backward of a block
    assert upload.reads[0].nbytes == 2 * down[9].reads[0].nbytes  # fp32 up, bf16 down
    assert round(gpu.report()["step"] / 2.27 - 1, 2) == 0.16
    assert gpu.report()["retries"]
    few = train("gpt-7b", OFFLOAD, 2048).tape
    down = [op for op in few if isinstance(op, Op) and op.label.startswith("download 'blocks")]
    assert round((down[9].end - down[8].end) * 1e3) == 32  # an upload, not the computation
    halves = [round(t * 2048 / 8192 * 1e3) for t in (forward, 0.038)]
    assert halves == [5, 10], halves
    speeds = [round(16384 / train("gpt-1.3b", OFFLOAD, 16384).report()["step"], -2)]
    speeds += [round(8192 / train("gpt-1.3b", None, 8192).report()["step"], -2)]
    assert speeds == [18_000, 18_700], speeds


def reads(op: Op, unit: str) -> bool:
    return any(buffer.label == f"all-gather '{unit}'" for buffer in op.reads)


# %% [markdown]
# An upload takes the same time for any number of tokens, and the computation does not. With 512
# tokens the GPU computes for 0.17 s and waits for the rest of 2.27. Four times as many tokens take
# not a moment longer, and sixteen times as many take 16 % longer. This is the step of 8,192 tokens:
#
# ![A timeline with lanes for computation, upload and download. In the forward the upload lane is
# full, and the compute lane has a gap after each block that is almost as wide as the block. In the
# backward the compute lane is full, and uploads and downloads have gaps between
# them.](17_offload.svg)
#
# Compare the upload lane with the compute lane. A block has 805 MB, and its upload takes 32 ms. The
# forward, the left half, computes with a block for 18 ms, so then it waits for the next one. The
# backward computes for 38 ms, twice as long, and both copies keep up. Nothing waits for a download
# except at the end, when nothing is left to compute. With 2,048 tokens a block computes for 5 ms in
# the forward and for about 10 in the backward, and both wait for uploads. (The gap in the middle is
# the allocator's: 8,192 tokens fill the GPU, so it has to give memory back, page
# [10](10_allocator.md).)
#
# Does bf16 not halve the copies? It halves the download. The gradient leaves the GPU in bf16, and
# the host casts it, which is what it does at the very end of the picture. It does not halve the
# upload: the shard in fp32 is copied, and the GPU casts it, because a host casts slowly. PyTorch
# does the same. (One could cast once in each step, after the optimizer, and keep a copy in bf16 for
# the uploads. It would take 13 GB more of the host's memory, and neither library does it.)
#
# This is an upload in the engine:
#
# {{ minifsdp/offload.py Upload -A source of -__init__ -Start to copy -Allocated in here
# -write to it -The copy, of -assert }}
#
# (`submit` runs a function on a stream and gives an event, which is passed when the copy is there.
# `record_stream` is on page [10](10_allocator.md).)
#
# `non_blocking=True` lets the host go on while the copy runs. That works from *pinned* memory only,
# which the operating system promises not to move or to swap out, so that the GPU can fetch it by
# its address. From any other memory CUDA [first copies to a pinned buffer of its
# own](https://forums.developer.nvidia.com/t/cudamemcpyaync-with-pageable-memory-overlap-with-kernal/238833/2),
# and the host waits for that. So on a real GPU minifsdp pins the shards and the gradients. It has a
# price: nobody else in the machine can use that memory, whether it is needed now or not.
#
# ## When it is worth it
#
# It is worth it if nothing else fits, and if a step has many tokens. Here is a GPT of 1.3 billion
# parameters, which fits with and without offload:


# %%
def batches() -> None:
    for tokens in (2048, 8192, 16384):
        for name, offload in {"without": None, "offload": OFFLOAD}.items():
            try:
                report = train("gpt-1.3b", offload, tokens).report()
            except torch.OutOfMemoryError:
                print(f"{tokens:6,} tokens, {name}: out of memory")
                continue
            seconds, peak = report["step"], report["peak allocated"] / 1e9
            print(f"{tokens:6,} tokens, {name}: {seconds:.2f} s, at most {peak:4.1f} GB")


# %% [markdown]
# With 2,048 tokens offload takes more than three times as long. It leaves room for 16,384 tokens,
# though, which do not fit without it, and then it handles 18,000 tokens in a second. Without it the
# GPU does not do much better: 18,700, with half as many tokens.
#
# That was the forward and the backward. The optimizer's step is slower on the host. Adam reads four
# numbers for each parameter, writes three of them back, and computes hardly anything. So what
# counts is how fast memory moves. Suppose that our GPU is one of eight in a machine, and that their
# eight processes share a host memory which moves 300 GB/s:


# %%
def adam_on_the_host() -> None:
    with cluster("a100-40", gpus_per_node=8, host_memory=300e9) as gpu:
        param = nn.Parameter(torch.zeros(1_000_000, device="cpu"))
        param.grad = torch.zeros_like(param)
        optimizer = torch.optim.AdamW([param], fused=True)
        optimizer.step()
        before = gpu.clock.now
        optimizer.step()
        seconds, gb = (gpu.clock.now - before) * 6_700, 4 * 4 * 6.7  # four numbers, of 4 bytes
        print(f"Adam for 6.7 billion: {seconds:.1f} s, {gb:.0f} GB at {gb / seconds:.0f} GB/s")


# %% [markdown]
# Adam takes longer than the forward and the backward together. (On a real host it takes even
# longer: the virtual one counts each of the four numbers once, also the three that are read and
# written.)
#
# (DeepSpeed, where offload is from, [has an Adam of its own for
# CPUs](https://github.com/microsoft/DeepSpeed/pull/468). With it,
# [ZeRO-Offload](https://arxiv.org/abs/2101.06840) reports models of 13 billion parameters on a
# single GPU.)
#
# But the optimizer's step takes equally long for any number of tokens. So use a large batch, or
# several batches before one step, as on page [20](20_no_sync.md).
#
# ## What breaks: a host that does not wait
#
# At the end of a backward the last gradients are still on their way. Without offload the host does
# not wait for them. It tells the compute stream to wait, and goes on. With offload it is the host
# itself that needs the gradients, so it has to wait:
#
# {{ minifsdp/core/reduce.py Reduction.wait_for_result }}
#
# Take out the first case, train the GPT of `make demo`, and ask the virtual GPU for *races*: uses
# of the same memory, one of them a write, without a fixed order (page [09](09_streams.md)). Offload
# itself is not a layer but two *strategies* of a unit, in [offload.py](../minifsdp/offload.py):
# `Upload` is where a gather gets its shard from, and `Download` is the last stage of a reduction.
# So take out that stage, too. (`three_times`, in [taken_out.py](taken_out.py), runs a program as it
# is, without a part, and with the part put back.)


# %%
def only_the_gpu_waits(reduction: Reduction) -> None:
    reduction.event.wait()


def a_step() -> str:
    with cluster() as gpu:
        policy = ModuleWrapPolicy({DemoBlock})
        model = FSDP(GPT(layers=4, width=128), auto_wrap_policy=policy, cpu_offload=OFFLOAD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(1, 64, dtype=torch.long)).sum().backward()
        optimizer.step()
    races = gpu.races()
    return "\n    ".join([f"{len(races)} races", *map(str, races[:2])])


def without_a_part() -> None:
    three_times(a_step, call("minifsdp.core.reduce.Reduction.wait_for_result", only_the_gpu_waits))
    three_times(a_step, stage(Download))


# %% [markdown]
# Without the stage the step ends with an error of torch that does not mention offload: a tensor in
# the host's memory cannot have a gradient on the GPU (which calls itself `meta` here). Without the
# wait there is no error.
#
# The operation `add_` is the optimizer's step: parameter plus update. It runs on the host and uses
# a gradient, the memory of a download, before the copy has filled it. On a real GPU the step would
# add whatever is in that memory: the gradient of the last step, zeros, or half of a gradient. It
# depends on how busy the link is, so it happens only now and then, and no error says so.
#
# PyTorch's first FSDP has a related problem. There each download is written to the same tensor,
# over what the last one has left, and that tensor is `.grad`. After two backwards with offload the
# gradients of the first one are gone ([seen with torch 2.13](../tests/test_lessons.py)). minifsdp
# downloads to new memory, waits, and adds.
#
# One more habit breaks offload, `model.to(device)`. It brings all shards to the GPU, so the next
# forward refuses to run:


# %%
def moved_by_hand() -> None:
    with cluster():
        model = FSDP(nn.Linear(8, 8), cpu_offload=OFFLOAD)
        model.to(torch.get_default_device())  # the virtual GPU, which calls itself "meta"
        try:
            model(torch.ones(8))
        except RuntimeError as error:
            print(error)


# %% [markdown]
# ## Predict, then run
#
# 1. A model is trained on eight GPUs instead of one. How much does each of them upload?
# 2. With `NO_SHARD` every rank keeps the whole model on its host, and what was uploaded for the
#    forward stays until the backward. How much does each of the eight upload then, compared with
#    `FULL_SHARD`?
#
# <details><summary>Answers</summary>
#
# 1. An eighth: its own shard. The rest comes from the other GPUs, over the faster links between
#    them, and each GPU has a PCIe link of its own.
# 2. With a GPT of 125 million parameters 4.8 times as much. It is the whole model and not an
#    eighth, but a block is uploaded once in a step and not twice. (That would be 4 times. But the
#    root's unit, the embedding, is uploaded once with either strategy, and it is a third of this
#    small model.)
#
# </details>


# %% [hidden]
def answers() -> None:
    one, eight = (train("gpt-125m", OFFLOAD, 512, gpus) for gpus in (1, 8))
    assert gigabytes(eight, "upload") == gigabytes(one, "upload") / 8  # 1. an eighth
    whole = train("gpt-125m", OFFLOAD, 512, 8, sharding_strategy=ShardingStrategy.NO_SHARD)
    times = gigabytes(whole, "upload") / gigabytes(eight, "upload")
    assert round(times, 1) == 4.8  # 2. that many


# %% [hidden]
def main() -> None:
    seven_billion()
    batches()
    adam_on_the_host()
    without_a_part()
    moved_by_hand()
    answers()


if __name__ == "__main__":
    main()

"""When a run goes wrong: python tutorials/31_debugging.py; the page is 31_debugging.md."""

# %% [markdown]
# # When a run goes wrong
#
# Your run hangs. Or its ranks compute different things, memory is full, or a step takes longer than
# it should. These are four illnesses, and what cures one does nothing for the other three. So **ask
# first which of the four it is, and then look at one thing**:
#
# | what you see | look first at | in plain PyTorch | in minifsdp |
# | --- | --- | --- | --- |
# | no more output | where each rank waits | all stacks, flight recorder | an error, after seconds |
# | a bad checkpoint | whether ranks agree | checksums; the mode `DETAIL` | an error, at once |
# | out of memory | what is there at the peak | a memory snapshot | `report()`, `--against` |
# | a slow step | what the compute stream does | the profiler's trace | `report()`, a timeline |
#
# Each of them happens below, and none needs a GPU.
#
# ## A hang
#
# A collective needs all ranks. In the smallest program that hangs, rank 1 has one batch more. Here
# it is with torch's FSDP and with minifsdp. After two seconds without progress an alarm goes off,
# and Python's own `faulthandler` writes down where the program is.

# %% [hidden]
import faulthandler
import re
import signal
import tempfile
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from taken_out import layer, said, three_times
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checks.rank_agreement import RankAgreement
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure

CPU, GENERAL = torch.device("cpu"), ("wrapper", "handle_torch_function")


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def wrap(kind: Any, model: nn.Module) -> nn.Module:
    """With gloo, also where there are GPUs: NCCL would end the process after a timeout."""
    torch.set_default_device(CPU)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    return kind(model.to(CPU), group, auto_wrap_policy=ModuleWrapPolicy({Tower}), device_id=CPU)


def step(model: nn.Module) -> float:
    tokens = torch.arange(26, device=CPU)
    loss = nn.functional.cross_entropy(model(tokens), (tokens * 7 + 3) % 26)
    loss.backward()
    return loss.item()


def stack(file: Any) -> str:
    """What faulthandler has written, the innermost function first, down to one of this page."""
    # The last one: a slow step may have left another before.
    names = re.findall(r" in ([a-z_]*[a-z])\n", file.seek(0) or file.read().rpartition("Stack")[2])
    inside = [name for name in names[: names.index("step")] if name not in GENERAL]
    return " < ".join([*[*dict.fromkeys(inside)][:3], "...", *names[names.index("step") :][:2]])


def recorded() -> str:
    """What torch's flight recorder has of this process. Older versions have none for gloo."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: "{}")
    names = re.findall(r'"profiling_name": *"(.*?)"', str(dump()))
    return f"{len(names)} collectives, the last is {names[-1]}" if names else "nothing"


def short(error: object) -> str:
    """Without the line of gloo's source, and without advice."""
    return re.sub(r"^\[.*?\] |( for (send|recv) op.*)", "", str(error)).partition(". ")[0]


# %%
@on_ranks(2)
def one_batch_more(kind: type[nn.Module]) -> None:
    model = wrap(kind, Towers())
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.register(signal.SIGALRM, file, all_threads=False)
        for _ in range(4 + dist.get_rank()):
            signal.alarm(2)  # unless it is cancelled before
            try:
                step(model)
            except RuntimeError as error:
                print(f"stack: {stack(file)}\nerror: {short(error)}")
            signal.alarm(0)
    print(f"flight recorder, with {kind.__module__.partition('.')[0]}'s FSDP: {recorded()}")


# %% [markdown]
# By default NCCL would wait for [ten minutes](https://github.com/pytorch/pytorch/pull/110947), not
# for five seconds, and gloo for half an hour. Meanwhile NCCL's kernel keeps the GPU busy, so that
# `nvidia-smi` shows nothing wrong. And then torch's error says neither where nor why.
#
# The *stack* says where: rank 1 is in a gather. So get the stacks of **all** ranks, and look for
# one that is somewhere else. (`py-spy dump --pid` shows that of a process without `faulthandler` in
# it.) The *flight recorder* says what came before. It is a list of the last collectives that a
# process has started (`TORCH_FR_BUFFER_SIZE`, formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`). Each rank
# writes it to a file when NCCL times out, unless `TORCH_NCCL_DUMP_ON_TIMEOUT=0`. The first entry
# that differs between two ranks, or that one of them does not have, is where they parted: here it
# is rank 1's last one, an all-gather. Under `torchrun --log-dir logs --redirects 3` each rank
# writes to a file of its own. Read that of the rank that failed first; the others have only lost
# it.
#
# minifsdp's error names both places; rank 0 has arrived at the end of the program. A thread looks
# twice a second whether its rank waits. After some seconds it writes into the store of the process
# group what its rank waits for, and compares this with what other ranks have written there
# ([deadlock_watch.py](../minifsdp/comm/deadlock_watch.py)). No rank has to answer. A rank that is
# slow, but does not wait, is never suspected. This works with gloo, where minifsdp sends from rank
# to rank, so that the recorder has no collective of it. minifsdp cannot end NCCL's waits, so there
# you need the stacks and the recorder.
#
# ## Ranks that differ: what breaks if nobody checks
#
# A hang is at least noticed. It is worse if ranks do different things, and the collectives fit all
# the same. In this model the outputs of two towers are added, so that their order should not
# matter. On rank 1 they run in the reverse order. That happens to a program that loops over a `set`
# of names, which each process may put in a different order.


# %%
class Towers(nn.Module):
    def __init__(self, order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(26, 32), nn.Linear(32, 26)
        self.towers, self.order = nn.ModuleList([Tower(), Tower()]), order

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        return self.head(sum(self.towers[i](x) for i in self.order))


@on_ranks(2)
def trained(kind: type[nn.Module], way: str) -> tuple[float, float]:
    torch.manual_seed(dist.get_rank() if way == "different seeds" else 0)
    plain = Towers((1, 0) if way == "different order" and dist.get_rank() == 1 else (0, 1))
    before, model = checksum(plain.state_dict()), wrap(kind, plain)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    saved, loaded = model.state_dict(), Towers()
    loaded.load_state_dict(saved)
    losses = step(model), step(loaded)
    print(f"{way:15}", before, checksum(saved), *(f"{loss:6.3f}" for loss in losses))
    return losses


# %% [hidden]
def checksum(state: dict[str, Tensor]) -> str:
    return f"{sum(value.double().sum().item() for value in state.values()):6.2f}"


# %% [markdown]
# There are two checksums, of all parameters before wrapping and of the checkpoint after 100 steps,
# and two losses, of the model that was trained and of one that has loaded its checkpoint.
#
# - With **different seeds** ranks differ before wrapping, and never again. Afterwards each has a
#   part of one model, a patchwork (page [19](19_sync_states.md)), and all gather the same.
# - With a **different order** no checksum tells, and training goes perfectly. The first gather is
#   of one tower on rank 0, and of the other tower on rank 1. So both get half of each, and train
#   with that. The checkpoint puts halves together that have never been used together. Its loss is
#   far above that of a guess, which is 3.3, the logarithm of 26.
#
# So **a falling loss does not tell** (page [24](24_parity.md)). Three things do. One is a checksum
# on each rank, *before* wrapping. Another is `TORCH_DISTRIBUTED_DEBUG=DETAIL`, with which torch's
# FSDP compares the order of units; [by default it does
# not](https://github.com/pytorch/pytorch/pull/79584), though it was known that this leads to ["hang
# or incorrect results"](https://github.com/pytorch/pytorch/issues/75373). The third is a checkpoint
# that is loaded and evaluated on the first day. Here is what torch says in that mode:


# %%
@on_ranks(2)
def in_that_mode() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as the variable does
    found = short(said(lambda: trained.body(TorchFSDP, "different order")))
    if dist.get_rank() == 1:  # the other rank is told the same
        print("torch:", found)


# %% [markdown]
# ## Taken out: the layer that compares
#
# minifsdp compares models and values once ([same_model.py](../minifsdp/checks/same_model.py)), and
# in the first two steps where ranks are
# ([rank_agreement.py](../minifsdp/checks/rank_agreement.py)). With NCCL it compares a hash of what
# they have started, after every tenth backward
# ([same_launches.py](../minifsdp/checks/same_launches.py)). The first two are done by a layer,
# `RankAgreement`. Page [19](19_sync_states.md) takes it out of ranks with different values. Here it
# is taken out of ranks with a different order (by `three_times`, in [taken_out.py](taken_out.py)):


# %%
@on_ranks(2)
def without_the_layer() -> None:
    three_times(lambda: trained.body(FSDP, "different order"), layer(RankAgreement))


# %% [markdown]
# With the layer both ranks know it before anything is gathered. Without it they wait for each other
# for some seconds. On a CPU minifsdp sends from rank to rank, and each message says what it is, so
# that the two towers are not mixed up as above. The watch ends the wait. NCCL's messages say
# nothing. There it would have been a bad checkpoint again.
#
# ## Out of memory
#
# PyTorch's error says how much it wanted, but not what is there. So find that out before you turn
# knobs. On a GPU, call `torch.cuda.memory._record_memory_history()` at the start, and
# `_dump_snapshot(file)` where you catch the error. `minifsdp sim ... --against file` sorts such a
# snapshot by who has asked for the memory, beside that of a virtual run.
#
# Here is a virtual run: 1.3 billion parameters on two machines of 8 GPUs. At first PyTorch has 16
# GiB of each A100. Then it has all of it, and each row changes one option of `python -m
# minifsdp.sim`. You see what there is at the peak, in GiB. Which option will help most?

# %% [hidden]
BASE = "--model gpt-1.3b --nodes 2 --steps 2"
KNOBS = ["", "--limit none", "--unit model", "--unit part", "--strategy shard_grad_op",
         "--strategy no_shard", "--recompute full", "--loss fused", "--batch 4",
         "--alloc expandable_segments:True"]  # fmt: skip
FIGURES = ("gathered parameters", "activations", "temporary", "peak reserved")


@cache
def run(words: str) -> dict[str, Any]:
    figures, _ = measure(options := parser().parse_args(words.split()))
    its = figures.get("peak allocated is", {})
    shards = sum(its.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
    return {**figures, **its, "shards": shards, "batch": options.batch}


# %%
def memory() -> None:
    print(run(f"{BASE} --memory 16")["why"].partition(" The virtual")[0], end="\n\n")
    print(f"{'':34}  shards gathered activations temporary reserved")
    for words in KNOBS:
        its = [run(f"{BASE} {words}")[name] / 2**30 for name in ("shards", *FIGURES)]
        print(f"{words or 'as it is':34}", "{:7.1f} {:8.1f} {:11.1f} {:9.1f} {:8.1f}".format(*its))


# %% [markdown]
# | most of the peak is | what helps |
# | --- | --- |
# | shards | more GPUs, a strategy that shards, offload (page [17](17_offload.md)) |
# | gathered parameters | smaller units (`minifsdp.explain(model)` lists them), `FULL_SHARD` |
# | activations | recomputation (page [15](15_recompute.md)), a smaller batch |
# | temporary, such as the logits of a loss | a fused loss, a smaller batch |
# | none: reserved is far above their sum | a limit (page [11](11_limiter.md)), `--alloc` |
#
# Here it is activations. Recomputation takes away 11 GiB of them. Smaller units take away none, but
# less is reserved: 18.5 GiB instead of 20.1. Both make the step longer.
#
# ## A slow step
#
# Look at the compute stream, in a timeline or in a trace of `torch.profiler`. At each moment it
# *computes*. Or it *waits* while NCCL works, which is exposed communication. Or *nothing* runs,
# since the host has not launched it yet. `report()` has these three numbers. Here they are for four
# slow runs, in % of the step: three of 1.3 billion parameters on four machines, and one of a small
# model on one. Behind them is the time for a sample, which was 100 %, with each of four remedies:
# `--recompute none`, `--strategy hybrid_shard` (shards within a machine), twice the batch, and
# `--unit block`.

# %% [hidden]
FOUR = "--model gpt-1.3b --nodes 4 --gpu a100-80 --steps 2"
ILL = {"much work": f"{FOUR} --recompute full", "slow network": f"{FOUR} --network 100",
       "small batch": f"{FOUR} --batch 1", "small units":
       "--model gpt-125m --gpu h100 --seq 128 --batch 1 --unit part --steps 2"}  # fmt: skip
REMEDIES = ("--recompute none", "--strategy hybrid_shard", "--batch TWICE", "--unit block")
THREE = {"computes": "compute", "waits": "exposed communication", "nothing runs": "idle"}


def parts(words: str, remedy: str = "") -> dict[str, float]:
    """Of the time for a sample, in % of what it is without the remedy."""
    before = run(words)
    now = run(f"{words} {remedy}".strip().replace("TWICE", str(2 * before["batch"])))
    whole = before["step"] / before["batch"] * now["batch"] / 100
    return {name: now[its] / whole for name, its in THREE.items()}


# %%
def slow() -> None:
    print(f"{'':13} computes  waits  nothing |", *(f"{r.split()[0]:>12}" for r in REMEDIES))
    for name, words in ILL.items():
        now, left = parts(words).values(), [sum(parts(words, r).values()) for r in REMEDIES]
        print(f"{name:13}", *(f"{n:7.0f}%" for n in now), "|", *(f"{n:11.0f}%" for n in left))


# %% [markdown]
# ![Bars of the time for a sample, each run above the same run with its remedy. Much work: 85 % are
# left, nearly all of it computation. A slow network: most of the waiting goes, and 71 % are left. A
# small batch: 52 %, of which waiting is less than half. Small units: nothing ran for nearly half of
# the time, and 61 % are left.](31_debugging.svg)
#
# - **It computes.** Then compute less: no recomputation where there is memory, lower precision, a
#   faster attention.
# - **It waits.** Then the network is slow, or there are too few tokens to hide a gather behind,
#   which is the same (page [23](23_settings.md)). Keep gathers off the slow network, or put more
#   tokens into a step.
# - **Nothing runs.** The host is behind. Give it less to launch: larger units and batches, or CUDA
#   graphs. What helps the network makes this run 19 % *longer*: there are all-reduces to launch,
#   too, though on one machine each has one rank only and sends nothing.
#
# Twice the batch helps nearly always, but is not the same training. `report()` also counts
# prefetches that are aimed at wrong units (page [13](13_targets.md)), and `model.engine.stats`
# those that the limiter has declined.
#
# ## Predict, then run
#
# 1. Nothing is sharded (`--strategy no_shard` above), and memory is full. Which saves more: to
#    recompute, or to shard?
# 2. Does it help the run with the slow network to allow four units at once (`--limit 4`)?
#
# <details><summary>Answers</summary>
#
# 1. To shard: 16.1 GiB less, as the table lets you expect. Recomputation saves 9.3, and not all of
#    the activations: without them the peak is at another moment, when gradients are there.
# 2. No. The network is busy for 95 % of the step, and cannot do more in it.
#
# </details>


# %% [hidden]
def answers() -> None:
    knobs = "--strategy no_shard", "--strategy no_shard --recompute full", ""
    peaks = [run(f"{BASE} {words}")["peak allocated"] / 2**30 for words in knobs]
    assert [round(peaks[0] - peak, 1) for peak in peaks[1:]] == [9.3, 16.1]  # 1.
    before, more = (run(ILL["slow network"] + words) for words in ("", " --limit 4"))
    assert round(before["communication"] / before["step"], 2) == 0.95
    assert 0.999 < more["step"] / before["step"] <= 1  # 2.
    assert round(sum(parts(ILL["small units"], REMEDIES[1]).values())) == 119


def main() -> None:
    one_batch_more(TorchFSDP)
    one_batch_more(FSDP)
    for way in ("alike", "different seeds", "different order"):
        for loss, loaded in trained(TorchFSDP, way):
            assert loss < 0.001 and (loaded > 3.3) == (way == "different order")
    in_that_mode()
    without_the_layer()
    memory()
    slow()
    rows = {}
    for (name, words), remedy in zip(ILL.items(), REMEDIES, strict=True):
        rows |= {name: parts(words), remedy.lower(): parts(words, remedy)}
    bars(Path(__file__).with_suffix(".svg"), "Time for a sample, in %", rows, "{:.0f} %".format)
    answers()


if __name__ == "__main__":
    main()

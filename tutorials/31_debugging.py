"""When a run goes wrong: python tutorials/31_debugging.py; the page is 31_debugging.md."""

# %% [markdown]
# # When a run goes wrong
#
# Your run stands still. Or ranks compute different things, memory is full, or a step takes longer
# than it should. These are four illnesses, and what heals one does nothing for the other three. So
# **ask first which of the four it is, and then look at one thing**:
#
# | what you see | look first at | in plain PyTorch | in minifsdp |
# | --- | --- | --- | --- |
# | no more output | where each rank waits | all stacks, flight recorder | an error, after seconds |
# | a bad checkpoint | whether ranks agree | checksums; the mode `DETAIL` | an error, at once |
# | out of memory | what is there at the peak | a memory snapshot | `report()`, `--against` |
# | a slow step | what the compute stream does | the profiler's trace | `report()`, a timeline |
#
# All that is printed below has happened on this page, and nothing needs a GPU.
#
# ## A hang
#
# A collective needs all ranks. The smallest program that hangs is one in which rank 1 has one batch
# more. Here is torch's FSDP, with a timeout of five seconds. After two seconds without progress
# `faulthandler`, which is part of Python, writes down where the program is:

# %% [hidden]
import faulthandler
import hashlib
import json
import math
import re
import tempfile
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from draw import bars
from launch import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import measure

PICTURE, CPU = Path(__file__).with_suffix(".svg"), torch.device("cpu")
TOKENS = torch.arange(26, device=CPU)
GENERAL = ("torch_function", "handle_torch_function", "wrapper")
THREE = {"computes": "compute", "waits": "exposed communication", "nothing runs": "idle"}
SHARDS = ("parameters", "gradients", "optimizer")


class Tower(nn.Sequential):
    def __init__(self, width: int = 64) -> None:
        super().__init__(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32))


def group(seconds: int = 60) -> dict[str, Any]:
    """Ranks on the CPU, also where there are GPUs: NCCL would end the process after a timeout."""
    torch.set_default_device(CPU)
    return {"process_group": dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))}


def wrap(kind: Any, model: nn.Module, **settings: Any) -> nn.Module:
    on_cpu = {"device_id": CPU} if kind is TorchFSDP else {}
    return kind(model, auto_wrap_policy=ModuleWrapPolicy({Tower}), **settings, **on_cpu)


def step(model: nn.Module) -> Tensor:
    loss = F.cross_entropy(model(TOKENS), (TOKENS * 7 + 3) % 26)
    loss.backward()
    return loss.detach()


def stack(file: Any) -> str:
    """What faulthandler has written, the innermost function first, down to a line of this page."""
    file.seek(0)
    found = re.findall(r'File ".*/(.*)", line (\d+) in (.*)', file.read())
    here = next(i for i, (name, *_) in enumerate(found) if name == Path(__file__).name)
    inside = [name for _, _, name in found[:here] if name.strip("_") not in GENERAL]
    name, line, function = found[here]
    return f"{' < '.join([*dict.fromkeys(inside)][:3])} < ... < {function}, {name}:{line}"


def recorded() -> str:
    """What torch's flight recorder has of this process. Older versions have none for gloo."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: "{}")
    entries = json.loads(dump()).get("entries") or [{"profiling_name": "nothing"}]
    return f"{len(entries)} collectives, the last: {entries[-1]['profiling_name']}"


# %%
@on_ranks(2)
def one_batch_more() -> None:
    model = wrap(TorchFSDP, Towers(), **group(seconds=5))
    with tempfile.TemporaryFile("w+") as file:
        for _ in range(2 + dist.get_rank()):
            faulthandler.dump_traceback_later(2, file=file)  # unless cancelled before
            try:
                step(model)
            except RuntimeError as error:
                print("stack:", stack(file))
                print("error:", *re.findall("Timed out.*ms", str(error)))
            faulthandler.cancel_dump_traceback_later()
    print("recorder:", recorded())


# %% [markdown]
# Without that timeout gloo would have waited for half an hour, and NCCL for [ten
# minutes](https://github.com/pytorch/pytorch/pull/110947). Meanwhile NCCL's kernel keeps the GPU
# busy, so that `nvidia-smi` shows nothing wrong. The error says neither where nor why.
#
# The *stack* says where: rank 1 is in the gather of a forward. So get the stacks of **all** ranks,
# and look for one that is somewhere else. (`py-spy dump --pid` shows that of a process without
# `faulthandler` in it.) The *flight recorder* says what came before. It is a list of the last
# collectives that a process has started, which torch keeps (`TORCH_FR_BUFFER_SIZE`, formerly
# `TORCH_NCCL_TRACE_BUFFER_SIZE`). With `TORCH_NCCL_DUMP_ON_TIMEOUT=1` each rank writes it to a file
# when NCCL times out. The first entry in which two ranks differ, or that one of them does not have,
# is where they parted: here it is rank 1's last one, an all-gather. Under `torchrun --log-dir logs
# --redirects 3` each rank writes to a file of its own. Read the one of the rank that failed first;
# the others have only lost it.
#
# This is the same mistake with minifsdp. When rank 0 has no more batches, it goes to a barrier:


# %%
@on_ranks(2)
def the_same_with_minifsdp() -> None:
    model = wrap(FSDP, Towers(), **group())
    try:
        for _ in range(4 + dist.get_rank()):
            step(model)
        dist.barrier(model.process_group)
    except RuntimeError as error:
        if dist.get_rank() == 1:
            print(error)


# %% [markdown]
# The error names both places. A thread looks twice a second whether its rank waits. After some
# seconds it writes what the rank waits for into the store of the process group, which needs no
# answer of other ranks, and compares ([deadlock_watch.py](../minifsdp/comm/deadlock_watch.py)). A
# rank that is slow, but does not wait, is never suspected. This works with gloo. With NCCL, whose
# waits cannot be ended from outside, you need the stacks and the recorder.
#
# ## Ranks that differ: what breaks if nobody checks
#
# A hang is at least noticed. It is worse if ranks do different things, and the collectives fit all
# the same. In this model the outputs of two towers are added, so that their order should not
# matter. On rank 1 they run in the reverse order. That happens to a program that loops over a `set`
# of names, which each process may put in a different order.


# %%
class Towers(nn.Module):
    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(26, 32), nn.Linear(32, 26)
        self.towers, self.backwards = nn.ModuleList([Tower(), Tower()]), backwards

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        towers = reversed(self.towers) if self.backwards else self.towers
        return self.head(sum(tower(x) for tower in towers))


@on_ranks(2)
def trained(way: str) -> tuple[float, float]:
    torch.manual_seed(dist.get_rank() if way == "different seeds" else 0)
    model = Towers(backwards=way == "different order" and dist.get_rank() == 1)
    before = checksum(model.state_dict())
    model = wrap(TorchFSDP, model, **group())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        step(model)
        optimizer.step()
        optimizer.zero_grad()
    saved, loaded = model.state_dict(), Towers()
    loaded.load_state_dict(saved)
    losses = step(model).item(), step(loaded).item()
    print(f"{way:15} {before} {checksum(saved)} {losses[0]:6.3f} {losses[1]:6.3f}")
    return losses


# %% [hidden]
def checksum(state: dict[str, Tensor]) -> str:
    """Of all bits, in a few letters: equal on all ranks, or ranks differ."""
    numbers = [number for value in state.values() for number in value.double().flatten().tolist()]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:4]


# %% [markdown]
# There are two checksums, of all parameters before wrapping and of the checkpoint after 100 steps,
# and two losses, of the model that was trained and of one that has loaded its checkpoint.
#
# - With **different seeds** ranks differ before wrapping, and never again. Afterwards each has a
#   part of one model, a patchwork (page [19](19_sync_states.md)), and all gather the same.
# - With a **different order** no checksum tells, and training goes perfectly. The first gather is
#   of one tower on rank 0 and of the other tower on rank 1. What they get is half of each, and with
#   that they train. The checkpoint puts halves together that have never been used together. Its
#   loss is far above that of a guess, which is the logarithm of 26, or 3.3.
#
# So **a falling loss does not tell** (page [24](24_parity.md)). Three things do. One is a checksum
# on each rank, *before* wrapping. Another is `TORCH_DISTRIBUTED_DEBUG=DETAIL`, with which torch's
# FSDP compares the order of units; [by default it does
# not](https://github.com/pytorch/pytorch/pull/79584), although it was known that this leads to
# ["hang or incorrect results"](https://github.com/pytorch/pytorch/issues/75373). The third is a
# checkpoint that is loaded and evaluated on the first day. Here is what is said without and with
# that mode:


# %%
@on_ranks(2)
def refused() -> tuple[str, ...]:
    backwards = dist.get_rank() == 1
    order = said(FSDP, backwards)
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as the variable does
    torchs = said(TorchFSDP, backwards)
    torch.manual_seed(dist.get_rank())
    seeds = said(FSDP)
    if backwards:  # the other rank is told the same
        print(f"minifsdp, seeds: {seeds}\nminifsdp, order: {order}\ntorch, order: {torchs}")
    return order, torchs


# %% [hidden]
def said(kind: Any, backwards: bool = False) -> str:
    try:
        step(wrap(kind, Towers(backwards), **group()))
    except (RuntimeError, ValueError) as error:
        return str(error).partition(". ")[0]
    return "no error"


# %% [markdown]
# minifsdp compares models and values once ([same_model.py](../minifsdp/checks/same_model.py)). In
# the first two steps it compares where ranks are
# ([rank_agreement.py](../minifsdp/checks/rank_agreement.py)), and with NCCL after every tenth
# backward a hash of what they have started
# ([same_launches.py](../minifsdp/checks/same_launches.py)).
#
# ## Out of memory
#
# PyTorch's error says how much it wanted, and not what is there. So find that out before you turn
# knobs. On a GPU, call `torch.cuda.memory._record_memory_history()` at the start, and
# `_dump_snapshot(file)` where you catch the error. `python -m minifsdp.sim ... --against file`
# sorts a snapshot by who has asked for the memory, beside that of a virtual run.
#
# Here is a virtual run: 1.3 billion parameters on two machines of 8 GPUs. At first PyTorch has 16
# GiB of each GPU. Then it has a whole A100 of 40 GB, and one thing at a time is changed. Each row
# is a run, and says what there is at the peak. Before you read on: which knob helps most?

# %% [hidden]
BASE = "--model gpt-1.3b --nodes 2 --steps 2"
KNOBS = {
    "as it is": "",
    "no limit": "--limit none",
    "the model as one unit": "--unit model",
    "parts of blocks as units": "--unit part",
    "kept after the forward": "--strategy shard_grad_op",
    "not sharded": "--strategy no_shard",
    "recomputation": "--recompute full",
    "the loss in one kernel": "--loss fused",
    "half the batch": "--batch 4",
    "expandable segments": "--alloc expandable_segments:True",
}


@cache
def run(words: str) -> dict[str, Any]:
    options = parser().parse_args(words.split())
    figures, _ = measure(options)
    return {**figures, "batch": options.batch}


# %%
def memory() -> dict[str, dict[str, float]]:
    print(run(f"{BASE} --memory 16")["why"].partition(" The virtual")[0], end="\n\n")
    print(f"{'GiB':24} shards gathered activations temporary reserved     step")
    found = {}
    for name, words in KNOBS.items():
        figures = run(f"{BASE} {words}")
        parts = found[name] = parts_of(figures)
        print(f"{name:24}", *(f"{parts[c] / 2**30:{w}.1f}" for c, w in COLUMNS.items()), end=" ")
        print(f"{figures['step'] * 1e3:6.0f} ms")
    return found


# %% [hidden]
COLUMNS = {"shards": 6, "gathered": 8, "activations": 11, "temporary": 9, "reserved": 8}


def parts_of(figures: dict[str, Any]) -> dict[str, float]:
    """``reserved``: in all."""
    its = figures["peak allocated is"]
    found = {"shards": sum(its.get(kind, 0) for kind in SHARDS)}
    found["gathered"] = its.get("gathered parameters", 0)
    found |= {kind: its.get(kind, 0) for kind in ("activations", "temporary")}
    return found | {"reserved": figures["peak reserved"]}


# %% [markdown]
# | most of the peak is | what helps |
# | --- | --- |
# | shards | more GPUs, a strategy that shards, offload (page [17](17_offload.md)) |
# | gathered parameters | smaller units (`minifsdp.explain(model)` lists them), `FULL_SHARD` |
# | activations | recomputation (page [15](15_recompute.md)), a smaller batch |
# | temporary, such as the logits of a loss | a fused loss, a smaller batch |
# | none: reserved is far above their sum | a limit (page [11](11_limiter.md)), `--alloc` |
#
# Most of it is activations here. So recomputation takes away 11 GiB, and smaller units next to
# nothing, though they too make the step longer.
#
# ## A slow step
#
# Look at the compute stream, in a timeline or in a trace of `torch.profiler`. At each moment it
# computes. Or it *waits*, while NCCL works, which is exposed communication. Or *nothing* runs,
# since the host has not launched it yet. Those are three numbers, and `report()` has them. Below
# are four runs that are slow, each with its three numbers, and what four remedies do to the time
# for a sample. (1.3 billion parameters on 4 machines; the last run is a small model on one.)

# %% [hidden]
FOUR = "--model gpt-1.3b --nodes 4 --gpu a100-80 --steps 2"
ILL = {
    "too much work": f"{FOUR} --recompute full",
    "a slow network": f"{FOUR} --network 100",
    "a small batch": f"{FOUR} --batch 1",
    "small units": "--model gpt-125m --gpu h100 --seq 128 --batch 1 --unit part --steps 2",
}
REMEDIES = {
    "no recomputation": "--recompute none",
    "shards in a machine": "--strategy hybrid_shard",
    "twice the batch": "",
    "blocks as units": "--unit block",
}


def parts(words: str, remedy: str = "") -> dict[str, float]:
    """Of the time for a sample, in % of what it is without the remedy."""
    before = run(words)
    treated = REMEDIES.get(remedy, "") or f"--batch {2 * before['batch']}"
    now = run(f"{words} {treated}") if remedy else before
    whole = before["step"] / before["batch"] * now["batch"] / 100
    return {name: now[its] / whole for name, its in THREE.items()}


# %%
def slow() -> dict[str, dict[str, float]]:
    print(f"{'':15} computes  waits  nothing |", *(f"{name:>19}" for name in REMEDIES))
    gains: dict[str, dict[str, float]] = {}
    for name, words in ILL.items():
        print(f"{name:15}", *(f"{part:7.0f}%" for part in parts(words).values()), end=" |")
        gains[name] = {r: sum(parts(words, r).values()) - 100 for r in REMEDIES}
        print(
            *(
                f"{gain:18.0f}%" if abs(gain) > 1e-6 else f"{'is so':>19}"
                for gain in gains[name].values()
            )
        )
    return gains


# %% [markdown]
# ![Bars of the time for a sample, each run above the same run with its remedy. Too much work: 100 %
# becomes 85, all of it computation. A slow network: most of the waiting goes, and 71 % are left. A
# small batch: half of the waiting, 52 %. Small units: nothing runs for half the time, and 57 % are
# left.](31_debugging.svg)
#
# - **It computes.** Then compute less: no recomputation where there is memory, lower precision, a
#   faster attention. The other remedies gain next to nothing, or as much as they make the rest
#   small.
# - **It waits.** Either the network is slow or there are too few tokens to hide a gather behind
#   (page [23](23_settings.md)). From the three numbers you cannot tell which, and need not: keep
#   gathers off the slow network, or put more tokens into a step.
# - **Nothing runs.** The host is behind. Give it less to launch: larger units and larger batches,
#   on a GPU also CUDA graphs or `torch.compile`. What the network needs is no remedy: shards within
#   each machine make this run *longer*, by 37 all-reduces that have to be launched. (Is the host
#   waiting, rather than late? `report()` has its stalls in the limiter.)
#
# Twice the batch helps nearly always, and is never the same training. And if prefetches are aimed
# at wrong units, `report()` counts them (page [13](13_targets.md)).
#
# ## Predict, then run
#
# 1. The second tower is wider than the first, the order is different again, and you have plain
#    PyTorch. Does training go perfectly?
# 2. Nothing is sharded, and memory is full ("not sharded" above). Which saves more: to recompute,
#    or to shard?
# 3. Does it help the run with the slow network to raise its limit from two units to four?
#
# <details><summary>Answers</summary>
#
# 1. No: a process dies in the first gather, since what arrives has the wrong size. Ranks that
#    differ are silent only if sizes agree, as those of the blocks of a transformer do.
# 2. To shard: 16.1 GiB less, as the table lets you expect. Recomputation saves 9.3, and not the
#    11.3 of the activations: without them the peak is at another moment, when gradients are there.
# 3. No. The network is busy for 95 % of the step, and cannot do more in it.
#
# </details>


# %% [hidden]
@on_ranks(2)
def of_different_sizes() -> None:
    model = Towers(backwards=dist.get_rank() == 1)
    model.towers[1] = Tower(width=96)
    step(wrap(TorchFSDP, model, **group(seconds=5)))


def answers() -> None:
    try:
        of_different_sizes()
    except RuntimeError as error:
        assert "rank" in str(error)  # 1. one dies, and the other one loses it
    else:
        raise AssertionError("it went well")
    whole, recomputed, sharded = (
        run(f"{BASE} {words}")["peak allocated"] / 2**30
        for words in (KNOBS["not sharded"], "--strategy no_shard --recompute full", "")
    )
    assert round(whole - recomputed, 1) == 9.3 and round(whole - sharded, 1) == 16.1  # 2.
    slow, more = run(ILL["a slow network"]), run(ILL["a slow network"] + " --limit 4")
    assert round(slow["communication"] / slow["step"], 2) == 0.95
    assert 0.999 < more["step"] / slow["step"] <= 1  # 3.


def draw(gains: dict[str, dict[str, float]]) -> None:
    rows = {}
    for (name, words), remedy in zip(ILL.items(), REMEDIES, strict=True):
        rows |= {name: parts(words), f"with {remedy}": parts(words, remedy)}
        assert gains[name][remedy] < -12
    bars(
        PICTURE, "Time for a sample, in % of what it is without the remedy", rows, "{:.0f} %".format
    )
    assert gains["small units"]["shards in a machine"] > 0


def main() -> None:
    one_batch_more()
    the_same_with_minifsdp()
    for way in ("alike", "different seeds", "different order"):
        for trained_, loaded in trained(way):
            assert trained_ < 0.001 and (loaded > math.log(26)) == (way == "different order")
    assert all("not in step" in ours and "differs" in torchs for ours, torchs in refused())
    found = memory()
    saved = found["as it is"]["activations"] - found["recomputation"]["activations"]
    assert round(saved / 2**30) == 11
    draw(slow())
    answers()


if __name__ == "__main__":
    main()

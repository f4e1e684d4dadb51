"""Hybrid sharding: python tutorials/22_hybrid.py; the page is 22_hybrid.md."""

# %% [markdown]
# # Hybrid sharding: a fast road and a slow one
#
# A model of 1.85 billion parameters trains on one machine of 8 GPUs, in steps of 237 ms. You rent
# 127 machines more. Each GPU computes as much as before, on data of its own, and sends 10.6 GB in a
# step, in bfloat16, instead of 9.3. And a step takes 641 ms.
#
# ## What a collective costs
#
# The GPUs of a machine talk over NVLink, here at 300 GB/s each. To the others a machine has a
# network: 200 Gbit/s are 25 GB/s, for its 8 GPUs together. In a *ring* each rank passes on to the
# next what it got from the one before. The virtual GPU takes this long for it:
#
# {{ minifsdp/sim/hardware/costs.py Cluster.ring_seconds }}
#
# A ring of all ranks leaves each machine once, with all the bytes. So 1,024 GPUs gather at the pace
# of one network. And the ring has 1,023 steps. Each takes time even to send next to nothing: 3
# microseconds within a machine, 12 if it leaves one, as 128 of them do. That is 4 ms a gather.
#
# ## A row for each machine
#
# HYBRID_SHARD makes each machine a row of the grid (page [16](16_groups.md)). Chunks are dealt
# out along the row, so gathers stay on the fast road, and so does the first half of a reduction. A
# rank has its chunk of the mean over its *machine* then. Its column all-reduces that, in halves:
#
# {{ minifsdp/reduce.py start_next_part }}
#
# Here are 8 of the 32 layers of a GPT of 7 billion parameters, on two networks:

# %% [hidden]
import functools
import warnings
from pathlib import Path
from unittest.mock import patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import nn

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ShardingStrategy, comm, reduce
from minifsdp.sim import VirtualGpu
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.tape import Op
from minifsdp.sim.training.models import Block, Gpt, Job, next_token
from minifsdp.sim.training.presets import MODELS

MODELS["gpt-7b:quarter"] = Job(lambda: Gpt(4096, 8, 32), (Block,), next_token)
SIZES = [(200, 1), (200, 8), (200, 32), (200, 128), (3200, 8), (3200, 128)]
RUN = "--model gpt-7b:quarter --gpu a100-80 --batch 2 --network {} --nodes {} --strategy {}_shard"
by_host = comm.groups.groups_by_host


# %%
@functools.cache
def step(network: int, machines: int, strategy: str) -> VirtualGpu:
    return simulate(parser().parse_args(RUN.format(network, machines, strategy).split()), steps=2)


def leaves_a_machine(gpu: VirtualGpu) -> float:
    columns = [op for op in gpu.tape if isinstance(op, Op) and op.stream == "replicate"]
    if columns:  # each of 8 GPUs has one; the tape is of two steps
        return 8 * sum(op.sent for op in columns) / 2
    return gpu.report()["bytes sent"] * (gpu.cluster.nodes > 1)


def scaling() -> None:
    print(f"{'':32} step  waits  memory  a GPU sends  a machine sends")
    rows = {}
    for network, machines in SIZES:
        for strategy in ("full", "hybrid")[:machines]:  # one machine is one row: both are the same
            gpu = step(network, machines, strategy)
            r, out = gpu.report(), leaves_a_machine(gpu) / 1e9
            computes, waits = r["compute"] * 1e3, (r["step"] - r["compute"]) * 1e3
            peak, sent = r["peak allocated"] / 1e9, r["bytes sent"] / 1e9
            name = f"{network:4} Gbit/s {8 * machines:5,} GPUs  {strategy:6}"
            times = f"{computes + waits:4.0f} ms {waits:3.0f} ms"
            print(f"{name} {times}  {peak:.1f} GB      {sent:4.1f} GB          {out:4.1f} GB")
            rows[name] = {"computes": computes, "waits for others": waits}
    bars(Path(__file__).with_suffix(".svg"), "one step", rows, "{:.0f} ms".format)


# %% [markdown]
# FULL_SHARD first. On the slow network 10.5 GB leave a machine at 20 GB/s (80 % of 25), and a
# quarter of the time is hidden behind the computation. From 64 to 1,024 GPUs the bytes stay, but
# 26 gathers and reductions have 960 steps more, each. That makes 0.1 s.
#
# HYBRID_SHARD sends less over the network, but not little. A GPU all-reduces only its chunk. But
# the eight of a machine have eight of them, and an all-reduce is two halves: twice the model,
# instead of three times. The rest of the gain is steps: a gather has 7. The fast network is faster
# than NVLink, and there HYBRID_SHARD gains nothing for this model. One of 1.3 billion has smaller
# layers and 74 collectives of 4 ms to hide: on 1,024 GPUs 352 ms, or 151. It costs memory: a chunk
# is an eighth, here 2.8 GB with Adam's averages, on any number of machines.
#
# ![Bars, mostly in pairs. With 200 Gbit/s they grow with the number of GPUs, and most of them is
# waiting. With 3,200 all are nearly as short as that of 8 GPUs.](22_hybrid.svg)
#
# The one thing to notice: all blue parts are nearly equal. More machines add only purple, time in
# which a GPU has nothing to compute. Hybrid sharding makes that slower, but does not end it.
#
# Believe the order of the bars, not the milliseconds: nobody is late, NCCL knows [ways with fewer
# steps](https://arxiv.org/abs/2506.20252), and no real cluster was compared.
#
# ## What breaks without it
#
# Four real ranks, two on each of two "machines". All weights are 1, rank `r` has the gradient
# `r + 1`, and the learning rate is 0.1. One step; then without the second half of the reduction;
# then with the two groups swapped, so that machines replicate and columns shard:


# %%
@on_ranks(4)
def two_machines(how: str) -> float:
    with patch.object(comm.groups, "hosts_of", lambda group: ["a", "a", "b", "b"]):
        row, column = by_host(dist.group.WORLD)
    pair = (column, row) if how == "groups swapped" else (row, column)
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = FSDP(layer, process_group=pair, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nothing = iter([lambda: None] * 2)
    all_reduce = (lambda *_: nothing) if how == "no second half" else reduce.all_reduce
    with patch.object(reduce, "all_reduce", all_reduce):
        model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    optimizer.step()
    return round(model.state_dict()["weight"].mean().item(), 2)


def broken() -> None:
    for how in ("as it is", "no second half", "groups swapped"):
        print(f"{how:14}  weights, by rank: {two_machines(how)}")
    with patch.object(comm.groups, "groups_by_host", lambda group: by_host(group)[::-1]):
        wrong = simulate(parser().parse_args(RUN.format(200, 8, "hybrid").split()), steps=2)
    print(f"64 GPUs, 200 Gbit/s, groups swapped: {wrong.report()['step'] * 1e3:,.0f} ms")


# %% [markdown]
# Without the second half each machine trains a model of its own. With the groups swapped the result
# is right, but a step takes nine times as long: each of the eight GPUs of a machine gathers over
# its network. A `process_group` is a pair (shard, replicate), and a `device_mesh` is (replicate,
# shard), here and in PyTorch.
#
# ## Predict, then run
#
# 1. How much longer does it take to gather *nothing* among 1,024 GPUs than among the 8 of a row?
# 2. With 3,200 Gbit/s and 64 GPUs both hardly wait. Why does HYBRID_SHARD take longer?


# %%
def answers() -> None:
    ring = step(200, 128, "full").cluster.ring_seconds
    ratio = ring(0, [*range(1024)]) / ring(0, [*range(8)])
    assert round(ratio) == 201  # 1. times: 128 x 12 + 895 x 3 microseconds, to 7 x 3
    full, hybrid = (step(3200, 8, strategy).report()["compute"] for strategy in ("full", "hybrid"))
    assert hybrid - full > 0.006  # 2. its optimizer has chunks to step that are 8 times as large
    small = "--model gpt-1.3b --network 3200 --nodes 128 --batch 4 --seq 512 --strategy {}_shard"
    runs = [simulate(parser().parse_args(small.format(s).split())) for s in ("full", "hybrid")]
    assert [round(gpu.report()["step"] * 1e3) for gpu in runs] == [352, 151]  # ms


# %% [hidden]
def main() -> None:
    scaling()
    broken()
    answers()


if __name__ == "__main__":
    main()

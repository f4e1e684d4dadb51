"""Choosing settings: python tutorials/23_settings.py; the page is 23_settings.md."""

# %% [markdown]
# # Choosing settings: when do gathers hide?
#
# You have a model, and machines. Which strategy, which units, which batch? Most of it follows from
# one question: does a gather take longer than the computation that it should hide behind? You can
# answer that on paper. This page derives the formula, works it for three machines, and compares it
# with the virtual GPU.
#
# ## The formula
#
# Take a unit of $P$ parameters, for example a block, and $T$ tokens on each GPU in a step.
#
# 1. **Compute.** For each token and each parameter there are a multiplication and an addition, so
#    the forward takes $2 P T / F$ seconds, where $F$ is the number of operations per second that
#    the GPU *reaches*. The backward takes twice as long, $4 P T / F$: it multiplies once for the
#    gradient of the input and once for that of the weight. (The product of queries and keys in
#    attention comes on top. It is small while sequences are shorter than the model is wide.)
# 2. **Gather.** A rank receives the shards of all $W - 1$ others. With $b$ bytes for each parameter
#    (2 in bf16) that is $b P (W-1)/W$ bytes, at $B$ bytes per second. $B$ is the slowest link: that
#    of the GPUs inside of a node (NVLink), or, with several nodes, the network of a node. NCCL's
#    rings let all GPUs of a node share it, so it is not divided by 8.
# 3. **Hide.** While a block is computed with, the next one is gathered. In the forward this hides
#    all of it if
#
#    $$\frac{2 P T}{F} \ge \frac{b P}{B} \cdot \frac{W-1}{W}
#    \qquad\text{that is}\qquad T \ge T^* = \frac{b}{2} \cdot \frac{F}{B} \cdot \frac{W-1}{W}$$
#
# The unit's size has cancelled out, and so has the model's. What is left is the number of *tokens
# on each GPU*, against the ratio of a machine's arithmetic to its network. In the backward a gather
# and a reduction of as many bytes share the network, and there is twice the computation to hide
# them: the same $T^*$. (With reductions in fp32, page [14](14_precision.md), it is 1.5 times that.)
#
# ## Three machines

# %% [hidden]
import warnings
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
from draw import strips
from taken_out import reason, three_times

from minifsdp.core.unit_state import STRATEGY
from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import preset
from minifsdp.sim.training.presets import MODELS

PICTURE = Path(__file__).with_suffix(".svg")
MODEL = "--model gpt-1.3b --seq 512"
with torch.device("meta"):
    GPT = MODELS["gpt-1.3b"].build()
PARAMS, UNITS = sum(param.numel() for param in GPT.parameters()), 24 + 1  # the blocks and the root


# %%
@dataclass(frozen=True)
class Machine:
    gpu: str
    nodes: int  # of 8 GPUs
    network: float  # of a node, Gbit/s

    @property
    def ranks(self) -> int:
        return 8 * self.nodes

    @property
    def flops(self) -> float:  # that large products reach, of the data sheet's
        return preset(self.gpu).flops * preset(self.gpu).products

    @property
    def bandwidth(self) -> float:  # 80 % of what the slowest link could do
        links = preset(self.gpu).links
        return 0.8 * (links if self.nodes == 1 else min(links, self.network * 1e9 / 8))


MACHINES = {
    "8 A100, one node, NVLink": Machine("a100-80", 1, 1600),
    "64 A100, 1,600 Gbit/s": Machine("a100-80", 8, 1600),
    "16 H100, 100 Gbit/s": Machine("h100", 2, 100),
}


def enough_tokens(machine: Machine, dtype_bytes: int = 2) -> float:
    shared = (machine.ranks - 1) / machine.ranks
    return dtype_bytes / 2 * machine.flops / machine.bandwidth * shared


def three_thresholds() -> None:
    for name, machine in MACHINES.items():
        print(f"{name:25} {machine.flops / 1e12:3.0f} TFLOPS, {machine.bandwidth / 1e9:3.0f} GB/s: "
              f"gathers hide from {enough_tokens(machine):6,.0f} tokens on each GPU")  # fmt: skip


# %% [markdown]
# On one node with NVLink two sequences of 512 tokens are enough. On 64 GPUs with a fast network
# it takes three. With a slow network each GPU needs 49,000 tokens, which for most models do not
# fit. There, `FULL_SHARD` over all GPUs waits for the network, whatever you do with prefetching and
# limits. No scheduling hides what takes longer than everything it could hide behind.
#
# ## From the formula to a step
#
# For a whole step, first measure how long the computation takes on *one node*, where the network
# plays no part. Call that $c$; a third is the forward. If $g$ is the time that the gathers of all
# units take together, and $r$ that of all reductions, a step takes
# $\max(c/3, g) + \max(2c/3, g + r)$.
#
# Bytes alone do not give $g$ and $r$. There is the *latency*: each collective takes some time
# however small it is, about 3 microseconds for each GPU on its way around the ring, and 12 where it
# leaves a node. And a large cluster has other jobs, whose messages are in the way. The virtual
# network has half a megabyte of them before each message that leaves a switch, which four nodes
# share (published runs on 64 GPUs and more were that slow,
# [collectives.py](../minifsdp/sim/hardware/collectives.py)). With 8 nodes that is every second
# message, and each step of the ring waits for it.


# %%
def collective(machine: Machine) -> float:
    """Seconds of all units' gathers, one after the other; reductions in bf16 take as long."""
    inside, crossing = machine.ranks - 1, 0
    if machine.nodes > 1:
        inside, crossing = machine.ranks - 1 - machine.nodes, machine.nodes
    foreign = 0.5e6 * max(1 - 4 / machine.nodes, 0)  # bytes before each GPU's message
    waits = (machine.ranks - 1) * foreign / (machine.bandwidth / 8)
    latency = inside * 3e-6 + crossing * 12e-6 + waits
    sent = 2 * PARAMS * (machine.ranks - 1) / machine.ranks
    return UNITS * latency + sent / machine.bandwidth


def predicted(machine: Machine, batch: int) -> float:
    compute = on_virtual_gpus(Machine(machine.gpu, 1, 1600), batch)["compute"]
    gather = reduce = collective(machine)
    return max(compute / 3, gather) + max(2 * compute / 3, gather + reduce)


def three_steps() -> None:
    rows: list[Any] = []
    for name, machine in MACHINES.items():
        rows.append((f"{name}: gathers hide from {enough_tokens(machine):,.0f} tokens on", []))
        for batch in (1, 4, 16):
            step, found = predicted(machine, batch), on_virtual_gpus(machine, batch)
            print(f"{name:25} {512 * batch:5} tokens: formula {step * 1e3:4.0f} ms, "
                  f"simulated {found['step'] * 1e3:4.0f} ms")  # fmt: skip
            assert 0.88 < step / found["step"] < 1.12
            rows.append(bar(512 * batch, found))
    strips(PICTURE, "Where the time of a step goes, simulated", rows, LEGEND)


# %% [hidden]
LEGEND = {"blue": "computes", "purple": "waits for the network", "gray": "waits for the host"}


@cache
def on_virtual_gpus(machine: Machine, batch: int, more: str = "") -> dict[str, Any]:
    return a_step(machine, batch, more)


def a_step(machine: Machine, batch: int, more: str) -> dict[str, Any]:
    words = f"{MODEL} --gpu {machine.gpu} --nodes {machine.nodes} --network {machine.network} "
    return simulate(parser().parse_args(f"{words} --batch {batch} {more}".split()), 2).report()


def bar(tokens: int, found: dict[str, Any]) -> Any:
    kinds = {"blue": "compute", "purple": "exposed communication", "gray": "idle"}
    shares = {colour: found[kind] / found["step"] for colour, kind in kinds.items()}
    return f"{tokens:,} tokens", [(s, colour, f"{s:.0%}") for colour, s in shares.items()]


# %% [markdown]
# ![Shares of a step, for three machines with 512, 2,048 and 8,192 tokens on each GPU. One node
# computes nearly all the time. 64 A100 wait for the network for 67 % of the step with 512 tokens,
# for 11 % with 2,048 and for 3 % with 8,192. 16 H100 with a slow network wait for 98, 93 and 75 %
# of it.](23_settings.svg)
#
# Formula and simulation agree within 12 %. The formula is a little low where gathers are hidden: it
# knows nothing of the root's gather, which comes before any computation, and of its reduction,
# which comes after all. Neither has anything to hide behind. $T^*$ itself tends to be too high, not
# too low: one node hides its gathers with 512 tokens already, because with products as small as
# these a GPU reaches less than the $F$ that it reaches with large ones, and computes for longer.
# Both are predictions. How far the simulator is from real machines is in [its
# README](../minifsdp/sim/README.md).
#
# The latency is the reason why the size of a unit matters after all. It has to be small beside the
# unit's own gather. For 64 GPUs it is 0.26 ms with the network to themselves, in which that network
# moves 42 MB, so a unit should have well over 20 million parameters. A block of this GPT has 50
# million. With other jobs it is 1.05 ms, and the bytes of a block take 0.6 ms: with 512 tokens
# these GPUs wait because of the latency, and with two blocks in a unit there would be half of it.
#
# ## What to do below the threshold
#
# On the slow network a step takes four times its computation. There are three ways out: more tokens
# (recomputation, page [15](15_recompute.md), makes room for them), fewer bytes, or a different
# road. `SHARD_GRAD_OP` keeps what it has gathered until the backward, so it sends two thirds.
# `HYBRID_SHARD` shards inside of a node and replicates between nodes (page [22](22_hybrid.md)). So
# gathers use NVLink, and only gradients cross the network, in all-reduces. With many nodes an
# all-reduce sends them twice, which is as much as `SHARD_GRAD_OP` sends over the network. With two
# nodes it sends them once: half to the other node as a reduce-scatter, half as a gather.


# %%
def slow_network() -> None:
    for strategy in ("full_shard", "shard_grad_op", "hybrid_shard"):
        more = "" if strategy == "full_shard" else f"--strategy {strategy}"
        found = on_virtual_gpus(MACHINES["16 H100, 100 Gbit/s"], 16, more)
        print(f"{strategy:13} step {found['step'] * 1e3:3.0f} ms, of which it computes "
              f"{found['compute'] * 1e3:.0f}; peak "
              f"{found['peak allocated'] / 2**30:.1f} GiB")  # fmt: skip


# %% [markdown]
# ## Taken out: what a setting is
#
# No setting is a layer. Each is one small thing that is chosen when the model is wrapped: the
# units' groups of ranks, a stage of their reductions ([strategies.py](../minifsdp/strategies.py)),
# a limiter, a prefetcher; and `SHARD_GRAD_OP` is a *reason*. A unit is freed when nobody has a
# reason to keep it any more, and this one is called STRATEGY
# ([unit_state.py](../minifsdp/core/unit_state.py)). What is left of `SHARD_GRAD_OP` if nobody has
# this reason? (`three_times` is in [taken_out.py](taken_out.py).)


# %%
def without_the_reason() -> None:
    def program() -> str:
        found = a_step(MACHINES["16 H100, 100 Gbit/s"], 16, "--strategy shard_grad_op")
        return f"step {found['step'] * 1e3:.0f} ms, {found['bytes sent'] / 1e9:.1f} GB sent by each"

    three_times(program, reason(STRATEGY))


# %% [markdown]
# What is left is `FULL_SHARD`, except for the root. With both strategies the root stays from its
# forward to its backward, and STRATEGY is the reason for that as well. So here it is gathered
# twice, too.
#
# ## Questions to decide by
#
# With Adam a parameter takes 16 bytes in fp32: 4 each for the value, the gradient and two averages.
#
# 1. Do 16 bytes for each parameter, and the activations, fit on one GPU with room to spare? Then
#    nothing has to be sharded. DDP is the simplest. `SHARD_GRAD_OP` sends as much, half of it in
#    the forward, so that on a slow network it may be faster (page [16](16_groups.md)).
# 2. Are there $T^*$ tokens or more on each GPU, with the network between nodes as $B$? Then
#    `FULL_SHARD` over all GPUs: it hides, and it needs the least memory.
# 3. If not, do the 16 bytes fit when they are shared by the GPUs of one node, together with the
#    activations? Then `HYBRID_SHARD`.
# 4. If not, is there room for the gathered model, 2 bytes for each parameter? Then
#    `SHARD_GRAD_OP`. Else `FULL_SHARD`, and as many tokens as fit.
# 5. Do the activations of so many tokens not fit? Then recomputation, selective before full.
# 6. Are there more than about a hundred ranks? Then reductions in fp32, and 1.5 $T^*$.
# 7. Is each block a unit? Yes, if its gather takes several times the latency; else several blocks.
#
# The limiter and backward prefetch stay as they are by default, `limit_all_gathers=True` and
# `BACKWARD_PRE`: one unit is computed with while one is gathered, and by the formula more at a time
# would not be faster (pages [11](11_limiter.md) and [12](12_prefetch.md)).
#
# You need not do this by hand. This command tries settings on the virtual GPU, prints the fastest
# that fit, and says why each of the others loses. What you give is kept, and the rest is searched
# (a minute or so):
#
# ```
# minifsdp plan --model gpt-1.3b --gpu h100 --nodes 2 --network 100 \
#     --batch 16 --seq 512
# ```
#
# ## Predict, then run
#
# 1. The network of the 64 A100 is replaced by one of 400 Gbit/s for each node. From how many
#    tokens on do gathers hide?
# 2. The model has fifty times as many parameters. How does $T^*$ change?
# 3. The 64 A100 are replaced by 64 H100, on the same network. Do you need more tokens or fewer?
#
# <details><summary>Answers</summary>
#
# 1. 5,375, four times as many.
# 2. Not at all. But so many tokens of a larger model need more memory.
# 3. More, 3,225 and not 1,344: a faster GPU has finished sooner, and the gather takes as long. A
#    network has to grow with its GPUs.
#
# </details>


# %% [hidden]
def answers() -> None:
    waits = [
        on_virtual_gpus(machine, batch) for machine in MACHINES.values() for batch in (1, 4, 16)
    ]
    shares = [round(100 * found["exposed communication"] / found["step"]) for found in waits]
    assert shares == [5, 2, 1, 67, 11, 3, 98, 93, 75]  # the picture's text
    assert round(enough_tokens(MACHINES["16 H100, 100 Gbit/s"]), -3) == 49_000
    slower, faster = Machine("a100-80", 8, 400), Machine("h100", 8, 1600)
    assert round(enough_tokens(slower)) == 5375  # 1. four times as many
    assert {*signature(enough_tokens).parameters} == {"machine", "dtype_bytes"}  # 2. no model in it
    assert round(enough_tokens(faster)) == 3225  # 3. more
    assert round(sum(param.numel() for param in GPT.blocks[0].parameters()) / 1e6) == 50
    latency = 55 * 3e-6 + 8 * 12e-6  # of 64 ranks on 8 nodes
    many = MACHINES["64 A100, 1,600 Gbit/s"]
    busy = latency + 63 * 0.5 * 0.5e6 / (many.bandwidth / 8)
    assert (round(latency * 1e3, 2), round(busy * 1e3, 2)) == (0.26, 1.05)
    assert round(latency * many.bandwidth / 1e6) == 42
    cluster = Cluster(preset(many.gpu), many.nodes, network=many.network * 1e9 / 8)
    assert (cluster.queued, cluster.quiet) == (0.5e6, 4)
    there = cluster.collective_seconds(0, [*range(64)])  # picks a protocol with less latency
    assert 0.75 * busy < there < busy


# %% [hidden]
def main() -> None:
    three_thresholds()
    three_steps()
    slow_network()
    without_the_reason()
    answers()


if __name__ == "__main__":
    main()

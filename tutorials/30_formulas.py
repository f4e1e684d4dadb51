"""A sheet of formulas: python tutorials/30_formulas.py; the page is 30_formulas.md."""

# %% [markdown]
# # A sheet of formulas
#
# Will this model fit on those GPUs? Is the network fast enough? Is 40 % a good share of the peak?
# You can answer such questions with a pencil, before anybody rents a machine. This page has the
# formulas. Each is derived in a sentence or two, and is then held against a step on the virtual
# GPU: what the formula says, what the run did, and the ratio of the two. At the end all of them
# stand in [one table](#the-sheet) that you can print, below an experiment that shows where they
# are wrong.
#
# The formulas are functions, too, in [formulas.py](formulas.py), which needs nothing but Python. So
# you can try them on your own model; or in a browser, with [a calculator](calculator.html) of its
# memory.
#
# | letter | what it means | unit |
# | --- | --- | --- |
# | $N$, $U$, $R$ | parameters of the model, of its largest block, of the root | |
# | $W$, $S$ | ranks in all; ranks that share one copy of the model | |
# | $b$ | bytes of one number that is sent: 2 in bf16, 4 in fp32 | bytes |
# | $T$ | tokens on each GPU in a step | |
# | $F$, $F_0$ | operations per second: what products reach; what the data sheet says | 1/s |
# | $B$ | bytes per second that the slowest link reaches | bytes/s |
# | $\alpha$ | latency of a collective | s |
# | $M$ | memory of a GPU that PyTorch can use | bytes |
#
# Unless the text says otherwise, all runs on this page are of a GPT of 1.3 billion parameters, with
# AdamW and in bf16, on two nodes of 8 A100 with 80 GB each, and 400 Gbit/s between the nodes. Its
# 24 blocks are units, and what is in no block is the root.

# %% [hidden]
from itertools import pairwise
from pathlib import Path
from typing import Any

import formulas as sheet
from draw import strips
from virtual_run import in_forward, most, operators, run, sizes

from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS

PICTURE = Path(__file__).with_suffix(".svg")
N, U, R = sizes("gpt-1.3b")
W, NODES = 16, 2
A100, NETWORK = GPUS["a100-80"], 0.8 * 400e9 / 8
REACHED = A100.flops * A100.products
FOUND: dict[str, Any] = {}


def train(words: str = "") -> Any:
    base = f"--model gpt-1.3b --gpu a100-80 --nodes {NODES} --network 400 --batch 4 --seq 1024 "
    return run(base + words)


def beside(what: str, formula: float, run: float, unit: str, within: float = 0.02) -> str:
    """A line of a table. The run has to be near what the formula says."""
    size = {"GB": 1e9, "ms": 1e-3, "Tflops": 1e12, "%": 1e-2}.get(unit, 1)
    assert abs(run / formula - 1) <= within, (what, formula, run)
    digits = 0 if unit.startswith("tokens") else 2
    return (f"{what:37} formula {formula / size:8,.{digits}f}, run {run / size:8,.{digits}f} "
            f"{unit}, ratio {run / formula:.3f}")  # fmt: skip


# %% [markdown]
# ## Memory
#
# Between steps a rank keeps, in fp32, a value (4 bytes), its gradient (4) and Adam's two averages
# (8) for each parameter, and it keeps them for $N/S$ parameters, because $S$ ranks share one copy:
# 16 $N/S$ bytes. It is the same with mixed precision, since what is kept is in fp32 either way
# (page [14](14_precision.md)). $S$ is 1 with DDP or `NO_SHARD`, $W$ with `FULL_SHARD` and
# `SHARD_GRAD_OP`, and the GPUs of a node with `HYBRID_SHARD`.
#
# On top of it comes what is *gathered*, in the precision of the computation. With a limit of two
# units these are the root and one block, $b (R + U)$ bytes. (The third unit of page
# [11](11_limiter.md) is a block that the host has freed, and the GPU still reads.) `SHARD_GRAD_OP`
# gathers all, $bN$. `NO_SHARD` gathers nothing, but in bf16 it has a copy of all parameters.


# %%
def memory_of_a_rank() -> None:
    for strategy in ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard"):
        for precision, b in (("bf16", 2), ("fp32", 4)):
            words = f"--strategy {strategy} --precision {precision} --batch 1 --seq 512"
            found = most(train(words)[1])
            kept = sum(found[kind] for kind in ("parameters", "gradients", "optimizer"))
            formula = sheet.state(N, sheet.sharers(strategy, W))
            print(beside(f"{strategy}, {precision}: kept", formula, kept, "GB", 0.001))
            formula = sheet.gathered(strategy, N, R, U, b)
            if formula:
                now = found["gathered parameters"]
                print(beside(f"{strategy}, {precision}: gathered", formula, now, "GB", 0.04))
    peak = train("--strategy no_shard --batch 1 --seq 512")[0]["peak allocated"]
    formula = sheet.state(N, 1, each=20)
    print(beside("no_shard: the peak, 20 bytes each", formula, peak, "GB", 0.001))


# %% [markdown]
# The gathered parameters are up to 4 % above the formula. A rank casts its own shard to bf16 before
# it sends it, and this copy is small, but not in the formula.
#
# The last line is the one to remember. PyTorch's AdamW needs one more tensor as large as all values
# while it steps. So a large model with few tokens needs 20 bytes for each parameter, and not 16.
#
# ## Bytes in a step
#
# In a gather each rank sends its shard, and passes on those of the others: $W - 1$ shards of $bN/W$
# bytes. A reduce-scatter does the same backwards. `FULL_SHARD` gathers for the forward and for the
# backward and reduces once, which makes three times $bN(W-1)/W$. `SHARD_GRAD_OP` makes two. So does
# DDP, because an all-reduce is a reduce-scatter and a gather (page [01](01_collectives.md)).
#
# {{ tutorials/formulas.py sent }}


# %%
def bytes_of_a_step() -> None:
    for strategy, gathers in (("full_shard", 2), ("shard_grad_op", 1), ("no_shard", 1)):
        found = train(f"--strategy {strategy} --batch 1 --seq 512")[0]["bytes sent"]
        print(beside(strategy, sheet.sent(N, W, gathers), found, "GB", 0.04))
    found = train("--strategy hybrid_shard --batch 1 --seq 512")[0]["bytes sent"]
    print(beside("hybrid_shard", sheet.sent_by_hybrid(N, 8, NODES), found, "GB", 0.04))
    found = train("--strategy full_shard --batch 1 --seq 512")[0]["bytes sent"]
    less = sheet.sent(N, W) - 2 * R * (W - 1) / W
    print(beside("full_shard, the root gathered once", less, found, "GB", 0.001))


# %% [markdown]
# The run sends 3 % less, since the engine keeps the root from the forward to the backward. With one
# gather of the root taken away, the formula is exact. In a larger model the root is a smaller part.
#
# ## The time of a collective
#
# A ring has $W - 1$ steps. Each takes some time however little it moves, 3 microseconds inside a
# node and 12 where it leaves one: the latency $\alpha$. The bytes take their time at the pace of
# the slowest link (page [22](22_hybrid.md)). The links reach 80 % of what they could do.
#
# {{ tutorials/formulas.py gather }}


# %%
def time_of_a_collective() -> None:
    gpu = train()[1]
    for what in ("all-gather 'blocks.12'", "reduce 'blocks.12'", "all-gather <root>"):
        taken = next(op.end - op.start for op in operators(gpu) if op.sent and op.label == what)
        params = R if "root" in what else U
        print(beside(what, sheet.gather(2 * params, NETWORK, W, NODES), taken, "ms", 0.001))


# %% [markdown]
# ## Operations, MFU, tokens per second
#
# For each token and each parameter the forward multiplies and adds, 2 operations, and the backward
# does so twice, 4: once for the gradient of the input, once for that of the weight. So a step takes
# $6NT$, and with full recomputation (page [15](15_recompute.md)) $8NT$.
#
# *Model flops utilization*, MFU, is the share of the data sheet's $F_0$ that these $6NT$ are in the
# time that the step took. What is computed again does not count, or one could raise it by
# recomputing. From one log line you get the other: tokens per second are $\mathrm{MFU} \cdot F_0 /
# 6N$.


# %%
def operations() -> None:
    tokens, (plain, _), (again, _) = 4 * 1024, train(), train("--recompute full")
    print(beside("6 N T", sheet.flops(N, tokens), plain["flops"], "Tflops", 0.07))
    print(beside("8 N T, recomputed", sheet.flops(N, tokens, True), again["flops"], "Tflops", 0.07))
    more = sheet.attention_flops(24, 2048, 1024, tokens)
    print(beside("6 N T, with attention", sheet.flops(N, tokens) + more, plain["flops"], "Tflops"))
    speed, share = plain["tokens/s per GPU"], plain["MFU"]
    print(beside("MFU", sheet.mfu(N, speed, A100.flops), share, "%", 0.07))
    formula = sheet.tokens_per_second(N, share, A100.flops)
    print(beside("tokens per second", formula, speed, "tokens/s", 0.07))


# %% [markdown]
# The run is 6 % above $6NT$, because $6NT$ leaves out the products of attention, which grow with
# the length of a sequence. With them the formula is 1 % too high: the table of positions has
# parameters, but nothing is multiplied with it. With recomputation the run is below $8NT$, because
# the second forward stops early (page [15](15_recompute.md)): the last product of a block is not
# computed again.
#
# ## When does communication hide?
#
# A block is computed with in $2UT/F$ seconds in the forward, and gathered in $bU/B \cdot (W-1)/W$.
# Both are proportional to $U$, so it cancels out: they are equal at
# $T^* = \frac{b}{2} \cdot \frac{F}{B} \cdot \frac{W-1}{W}$ tokens on each GPU. Page
# [23](23_settings.md) derives it more carefully, also for the backward, and works it for three
# machines. Here it is with the block that you have just seen.
#
# {{ tutorials/formulas.py enough_tokens }}

# %% [hidden]
TOKENS = (1024, 2048, 3072, 4096, 6144, 8192)


def draw(measured: dict[int, tuple[float, float]], formula: float) -> None:
    gathers = measured[TOKENS[0]][1]
    rows: list[Any] = [("the gather", [(gathers, "purple", f"{gathers * 1e3:.1f} ms")])]
    for tokens, (block, _) in measured.items():
        rows.append((f"{tokens:,} tokens", [(block, "blue", f"{block * 1e3:.1f} ms")]))
    title = f"A block in the forward: gathered, and computed with; T* = {formula:,.0f}"
    strips(PICTURE, title, rows, {"purple": "gathered", "blue": "computed with"})


# %%
def when_it_hides() -> None:
    formula = sheet.enough_tokens(REACHED, NETWORK, W)
    measured = {n: in_forward(train(f"--batch {n // 1024}")[1], 12) for n in TOKENS}
    for (few, (before, gathers)), (many, (after, _)) in pairwise(measured.items()):
        if before < gathers <= after:
            found = few + (many - few) * (gathers - before) / (after - before)
    print(beside("T*", formula, found, "tokens", 0.18))
    FOUND["T*"] = found
    draw(measured, formula)


def time_of_a_step() -> None:
    gathers = sheet.gather(2 * R, NETWORK, W, NODES) + 24 * sheet.gather(2 * U, NETWORK, W, NODES)
    for tokens in (1024, 2048, 8192):
        figures = train(f"--batch {tokens // 1024}")[0]
        compute = train(f"--batch {tokens // 1024} --nodes 1")[0]["compute"]  # as on page 23
        formula = sheet.step(compute, gathers, gathers)
        print(beside(f"a step of {tokens} tokens", formula, figures["step"], "ms", 0.1))


# %% [markdown]
# ![Bars of time for one block in the forward. Its gather takes 2.4 ms, whatever the number of
# tokens. It is computed with for 0.8 ms with 1,024 tokens, for 2.3 with 4,096 and for 3.6 with
# 6,144.](30_formulas.svg)
#
# In the picture the two are equal between 4,096 and 6,144 tokens, at about 4,200. The formula says
# 5,119, because it takes $F$ to be what large products reach, and leaves out all that is no
# product. So $T^*$ tokens are enough. The last three lines are the whole step, with the computation
# measured on one node. They are up to 10 % above the formula. The root's gather and its reduction
# hide behind nothing, and a kernel is slower while a collective runs beside it.
#
# ## How many GPUs at least?
#
# When AdamW steps, 20 bytes for each parameter have to fit, shared by all GPUs, beside whatever
# else is in memory then. So $W \ge 20N / (M - \text{others})$. Here are 7 billion parameters on
# A100 with 40 GB, with one sequence of 512 tokens:


# %%
def how_many_gpus() -> None:
    memory = Cluster(GPUS["a100-40"]).capacity
    least = sheet.gpus_at_least(sizes("gpt-7b")[0], memory)
    print(f"formula: 20 bytes for {sizes('gpt-7b')[0] / 1e9:.2f} billion parameters, "
          f"{memory / 1e9:.1f} GB on each: {least} GPUs")  # fmt: skip
    for gpus in (least - 1, least):
        words = f"--model gpt-7b --gpu a100-40 --nodes 1 --gpus {gpus} --batch 1 --seq 512"
        fits = train(words)[0]["fits"]
        print(f"run with {gpus}: {'fits' if fits else 'out of memory'}")
        assert fits == (gpus == least)


# %% [markdown]
# Sixteen bytes would have said three, and three GPUs run out of memory.
#
# ## What the sheet leaves out
#
# $T^*$ knows nothing of latency. That is right for large units, and wrong for small ones. Here are
# three models on 32 H100 with 3,200 Gbit/s for each node. Each GPU has 2,048 tokens, which is more
# than $T^*$. By the sheet all three hide their gathers. Before you read on: do they?


# %%
def small_units() -> None:
    h100, network = GPUS["h100"], 0.8 * 3200e9 / 8
    reached = h100.flops * h100.products
    print(f"T* = {sheet.enough_tokens(reached, network, 32):,.0f} tokens")
    for name in ("gpt-125m", "gpt-1.3b", "gpt-7b"):
        found, _ = train(f"--model {name} --gpu h100 --nodes 4 --network 3200 --batch 2")
        waits, unit = found["exposed communication"] / found["step"], sizes(name)[1]
        gathers, alpha = sheet.gather(2 * unit, network, 32, 4), sheet.latency(32, 4)
        print(f"{name:8}  a gather takes {gathers * 1e3:.2f} ms, {alpha * 1e3:.2f} of it latency; "
              f"waits for {waits:3.0%} of the step; "
              f"T* with latency {gathers * reached / (2 * unit):6,.0f}")  # fmt: skip
        FOUND[name] = waits


# %% [markdown]
# The smallest model waits for 18 % of the step. Of the 0.17 ms that its gather takes, 0.13 are
# latency, and a block of 7 million parameters is soon computed with. With the latency in it, the
# formula would ask for four times as many tokens. For 7 billion parameters it would ask for a tenth
# more, so there $T^*$ is good enough. Hence the rule of page [23](23_settings.md): make units
# so large that their gather takes several times the latency.
#
# The sheet is also silent about most of the memory. It counts the tensors of a model, while
# an allocator reserves segments (page [10](10_allocator.md)); and it counts two units, which is
# right only as long as a limiter makes the host wait. Here are the 7 billion parameters again, with
# and without one:


# %%
def memory_of_the_allocator() -> None:
    kept = sheet.state(sizes("gpt-7b")[0], 64) / 1e9
    for limit in ("2", "none"):
        words = f"--model gpt-7b --gpu h100 --network 3200 --nodes 8 --batch 2 --limit {limit}"
        found, _ = train(words)
        allocated, reserved = found["peak allocated"] / 1e9, found["peak reserved"] / 1e9
        print(f"limit {limit:4}: state by the sheet {kept:.1f} GB, allocated {allocated:.1f}, "
              f"reserved {reserved:.1f}")  # fmt: skip
        FOUND[limit] = reserved, found["peak allocated is"]["activations"] / 1e9 / allocated


# %% [markdown]
# The sheet says the same of both, and without a limit 2.7 times as much memory is reserved. Page
# [11](11_limiter.md) says why. More than half of what is allocated are activations, which the sheet
# leaves out as well: page [15](15_recompute.md) is about them, and the
# [calculator](calculator.html) counts those of a GPT.
#
# Three more things are missing. A GPU does not reach $F$ with small products, as you have seen at
# $T^*$. The host has to launch all work, and a small model on a fast GPU waits for it (page
# [09](09_streams.md)). And on a real cluster all ranks wait for the slowest one.
#
# ## The sheet
#
# | what | formula | unit | runs are within |
# | --- | --- | --- | --- |
# | ranks that share one copy, $S$ | 1 DDP; $W$ `FULL_SHARD`; those of a node `HYBRID_SHARD` | | |
# | parameters; gradients; Adam | $4N/S$; $4N/S$; $8N/S$ | bytes | 0.1 % |
# | all of them; while AdamW steps | $16N/S$; $20N/S$ | bytes | 0.1 % |
# | gathered, `FULL_SHARD`, `HYBRID_SHARD` | $b(R+U)$ | bytes | 4 % |
# | gathered, `SHARD_GRAD_OP` | $bN$ | bytes | 4 % |
# | GPUs at least | $W \ge 20N/(M - \text{others})$ | | |
# | a gather or a reduction sends | $bN(W-1)/W$ | bytes | 0.1 % |
# | a step of `FULL_SHARD` sends | $3bN(W-1)/W$ | bytes | 4 % |
# | a step of `SHARD_GRAD_OP` or DDP sends | $2bN(W-1)/W$ | bytes | 4 % |
# | a step of `HYBRID_SHARD`, $k$ nodes of $S$ | $3bN(S-1)/S + 2b(N/S)(k-1)/k$ | bytes | 4 % |
# | latency of a ring, $\alpha$ | 3 µs for a step inside, 12 µs for each node | s | 0.1 % |
# | time of a gather or reduction | $\alpha + bU(W-1)/(BW)$ | s | 0.1 % |
# | time of an all-reduce | twice that | s | |
# | operations of a step; recomputed | $6NT$; $8NT$ | | 7 % |
# | attention on top, $L$ layers, width $d$, length $s$ | $12LdsT$ | | 2 % |
# | gathers hide from | $T^* = \frac{b}{2} \cdot \frac{F}{B} \cdot \frac{W-1}{W}$ | tokens | 18 % |
# | a step: $c$ computes, $g$ gathers, $r$ reduces | $\max(c/3, g) + \max(2c/3, g+r)$ | s | 10 % |
# | uploads of a step with offload | $4(2N - R)$ | bytes | problem 13 |
# | `no_sync()`, $m$ batches, `FULL_SHARD` sends | $(2m+1)bN(W-1)/W$ | bytes | problem 12 |
# | a shard, padded with zeros | $\lceil U/W \rceil$ | numbers | problem 6 |
# | a checkpoint with Adam's averages | $12N$ | bytes | problem 5 |
# | MFU | $6N \cdot$ tokens per second $/ F_0$ | | 7 % |
# | tokens per second of a GPU | $\mathrm{MFU} \cdot F_0 / 6N$ | 1/s | 7 % |
#
# The last column says how near the runs above were, or which of the [problems](problems.md) has a
# run of it. $F$ is about 0.5 to 0.7 of $F_0$, and $B$ is 0.8 of what the link could do. Here are
# the constants of three GPUs, from their data sheets and as the virtual GPU has them:


# %%
def constants() -> None:
    for name in ("a100-40", "a100-80", "h100"):
        gpu = GPUS[name]
        print(f"{name:8} M {Cluster(gpu).capacity / 1e9:.1f} GB, F0 {gpu.flops / 1e12:.0f} Tflops, "
              f"F {gpu.flops * gpu.products / 1e12:.0f}, links {gpu.links / 1e9:.0f} GB/s, "
              f"PCIe {gpu.pcie / 1e9:.1f} GB/s")  # fmt: skip


# %% [markdown]
# Now you: [fifteen problems](problems.md) with worked answers, from the memory of a rank to what a
# limit saves.
#
# ## Predict, then run
#
# 1. A model has 70 billion parameters, and a GPU has 83 GB for PyTorch. How many GPUs does AdamW
#    need at least, if there is nothing else in memory?
# 2. The GPT above is sharded over 256 GPUs instead of 16. How much more does a rank send in a step?
# 3. A log says 3,100 tokens per second on each H100, for 7 billion parameters with full
#    recomputation. What is the MFU?
#
# <details><summary>Answers</summary>
#
# 1. 17: 20 bytes each are 1,400 GB.
# 2. 6 % more. Of $(W-1)/W$ there is not much left to grow.
# 3. 13 %. That the GPU in fact computes a third more does not count.
#
# </details>


# %% [hidden]
def answers() -> None:
    waits = [round(100 * FOUND[name]) for name in ("gpt-125m", "gpt-1.3b", "gpt-7b")]
    assert waits == [18, 5, 4] and round(FOUND["none"][0] / FOUND["2"][0], 1) == 2.7
    assert round(FOUND["T*"], -2) == 4200 and FOUND["2"][1] > 0.5  # of it are activations
    assert sheet.gpus_at_least(70e9, 83e9) == 17 and 20 * 70 == 1400  # 1. seventeen
    assert round(100 * sheet.sent(N, 256) / sheet.sent(N, 16)) == 100 + 6  # 2. little more
    assert round(100 * sheet.mfu(7e9, 3100, GPUS["h100"].flops)) == 13  # 3. without the second


# %% [hidden]
def main() -> None:
    memory_of_a_rank()
    bytes_of_a_step()
    time_of_a_collective()
    operations()
    when_it_hides()
    time_of_a_step()
    how_many_gpus()
    small_units()
    memory_of_the_allocator()
    constants()
    answers()


if __name__ == "__main__":
    main()

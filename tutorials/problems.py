"""Fifteen problems with numbers: python tutorials/problems.py writes problems.md.

Each has a question, the arithmetic of its answer, and what a run says. All figures in the text are
computed here, and a problem whose answer is too far from the run fails. So what is on the page
cannot be stale.
"""

import sys
import textwrap
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as in build.py
import formulas as sheet
from torch import nn
from virtual_run import most, operators, run, sizes

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import cluster
from minifsdp.sim.figures.report import last_step
from minifsdp.sim.hardware.costs import Cluster
from minifsdp.sim.hardware.gpus import GPUS
from minifsdp.sim.tape import Phase

PAGE = HERE / "problems.md"
REACHED = 0.8  # of a link


class Problem(NamedTuple):
    """What stands on the page: markdown."""

    title: str
    question: str
    answer: list[str]  # lines of arithmetic
    says: str  # the virtual GPU


farthest: list[float] = []


def off(formula: float, found: float, within: float) -> str:
    """How far a run is from an answer, in words.

    Raises:
        AssertionError: too far.
    """
    ratio = found / formula - 1
    assert abs(ratio) <= within, (formula, found, within)
    farthest.append(abs(ratio))
    if abs(ratio) < 0.005:
        return "as computed"
    return f"{percent(abs(ratio))} {'more' if ratio > 0 else 'less'}"


def percent(share: float, digits: int = 0) -> str:
    return f"{share * 100:.{digits}f} %"


def gb(nbytes: float, digits: int = 1) -> str:
    return f"{nbytes / 1e9:,.{digits}f} GB"


def billion(params: float) -> str:
    return f"{params / 1e9:.2f} billion"


def train(words: str) -> dict[str, Any]:
    return run(words)[0]


def reached(gpu: str) -> float:
    return GPUS[gpu].flops * GPUS[gpu].products


# ------------------------------------------------------------------------------------- memory


def memory_by_strategy() -> Problem:
    n, *_ = sizes("gpt-1.3b")
    lines, says = [], []
    for strategy, name in (("no_shard", "DDP"), ("full_shard", "FULL_SHARD"),
                           ("hybrid_shard", "HYBRID_SHARD")):  # fmt: skip
        words = f"--model gpt-1.3b --gpu a100-80 --nodes 2 --strategy {strategy} --batch 1"
        sharers = sheet.sharers(strategy, 16)
        found = most(run(f"{words} --seq 512")[1])
        kept = sum(found[kind] for kind in ("parameters", "gradients", "optimizer"))
        formula = sheet.state(n, sharers)
        lines.append(f"{name}: 16 bytes × {billion(n)} / {sharers} = {gb(formula, 2)}")
        says.append(f"{gb(kept, 2)} ({off(formula, kept, 0.01)})")
    return Problem(
        "Memory by strategy",
        f"A GPT of {billion(n)} parameters is trained with AdamW on two nodes of 8 GPUs. It "
        "computes in bf16, and what it keeps is in fp32. How much memory does each GPU need for "
        "parameters, gradients and Adam's averages, with DDP, with `FULL_SHARD` and with "
        "`HYBRID_SHARD`?",
        lines,
        f"{', '.join(says)}.",
    )


def largest_model() -> Problem:
    memory = Cluster(GPUS["a100-40"]).capacity
    most_params = 8 * memory / 20
    lines = [
        f"While AdamW steps there are 20 bytes for each parameter: N ≤ 8 × {gb(memory)} / 20 = "
        f"{most_params / 1e9:.1f} billion",
    ]
    words = "--gpu a100-40 --nodes 1 --batch 1 --seq 512 --model"
    fits = []
    for name in ("gpt-13b", "gpt-30b"):
        params = sizes(name)[0]
        formula = params <= most_params
        need = sheet.state(params, 8, each=20)
        lines.append(f"{billion(params)} parameters: 20 × {billion(params)} / 8 = {gb(need)}, "
                     f"which {'fits' if formula else 'does not fit'}")  # fmt: skip
        assert train(f"{words} {name}")["fits"] == formula
        fits.append(formula)
    assert fits == [True, False]
    peak = train(f"{words} gpt-13b")["peak reserved"]
    return Problem(
        "The largest model for eight GPUs",
        "You have one node of 8 A100 with 40 GiB, or 42.9 GB, of which PyTorch can use "
        f"{gb(memory)}. You want to train with AdamW and `FULL_SHARD`, with few tokens at a time. "
        "How many parameters can a model have at most, and which of the two, 13 or 30 billion, is "
        "possible?",
        lines,
        f"the smaller one fits, with {gb(peak)} reserved, and the larger one runs out of memory. "
        "What is gathered and the activations need the rest.",
    )


def bytes_of_a_step() -> Problem:
    n, _, root = sizes("gpt-7b")
    words = "--model gpt-7b --gpu h100 --nodes 2 --network 3200 --batch 1 --seq 512 --strategy"
    one = sheet.sent(n, 16, gathers=0)
    full, half = sheet.sent(n, 16), sheet.sent(n, 16, gathers=1)
    found = [train(f"{words} {name}")["bytes sent"] for name in ("full_shard", "shard_grad_op")]
    return Problem(
        "Bytes in a step",
        f"A GPT of {billion(n)} parameters is sharded over 16 GPUs and communicates in bf16. How "
        "many bytes does a GPU send in one step with `FULL_SHARD`, with `SHARD_GRAD_OP` and with "
        "DDP?",
        [
            f"One gather or reduction: 2 bytes × {billion(n)} × 15/16 = {gb(one)}",
            f"`FULL_SHARD`, two gathers and a reduction: 3 × {gb(one)} = {gb(full)}",
            f"`SHARD_GRAD_OP`, one of each: 2 × {gb(one)} = {gb(half)}; DDP's all-reduce is as "
            "much",
        ],
        f"{gb(found[0])} ({off(full, found[0], 0.02)}) and {gb(found[1])} "
        f"({off(half, found[1], 0.01)}). With `FULL_SHARD` the root, {root / 1e6:.0f} million "
        "parameters, is gathered only once.",
    )


def savings_of_bf16() -> Problem:
    n, unit, root = sizes("gpt-1.3b")
    words = "--model gpt-1.3b --gpu a100-80 --nodes 2 --batch 1 --seq 512 --precision"
    (low, low_gpu), (high, high_gpu) = run(f"{words} bf16"), run(f"{words} fp32")
    kept = sheet.state(n, 16)
    sent = [sheet.sent(n, 16, dtype_bytes=b) for b in (4, 2)]
    whole = [sheet.gathered("full_shard", n, root, unit, b) for b in (4, 2)]
    gathered = [most(gpu)["gathered parameters"] for gpu in (high_gpu, low_gpu)]
    off(whole[1], gathered[1], 0.03)
    return Problem(
        "What bf16 saves",
        f"The GPT of {billion(n)} parameters is trained on 16 GPUs with `FULL_SHARD`, and you "
        "switch from fp32 to mixed precision with bf16. Its embeddings and the like, the root, "
        f"have {root / 1e6:.0f} million parameters, and each block has {unit / 1e6:.0f} million. "
        "By how much does each of these shrink: what a GPU keeps, what it has gathered with a "
        "limit of two units, and what it sends in a step?",
        [
            f"Kept: 16 × {billion(n)} / 16 = {gb(kept, 2)}, in both, because it stays in fp32",
            f"Gathered, root and block: 4 × {(root + unit) / 1e6:.0f} million = "
            f"{gb(whole[0], 2)}, and with 2 bytes {gb(whole[1], 2)}",
            f"Sent: 3 × 4 × {billion(n)} × 15/16 = {gb(sent[0])}, and with 2 bytes {gb(sent[1])}",
        ],
        f"gathered {gb(gathered[0], 2)} and {gb(gathered[1], 2)}; sent "
        f"{gb(high['bytes sent'])} and {gb(low['bytes sent'])} "
        f"({off(sent[1], low['bytes sent'], 0.04)}: the root is gathered once).",
    )


def checkpoints() -> Problem:
    n, *_ = sizes("gpt-7b")
    found = most(run("--model gpt-7b --gpu h100 --nodes 2 --network 3200 --batch 1 --seq 512 "
                     "--strategy full_shard")[1])  # fmt: skip
    mine = found["parameters"] + found["optimizer"]
    whole, disk = 12 * n, 2e9
    return Problem(
        "The size of a checkpoint",
        f"A model of {billion(n)} parameters is trained with AdamW on 16 GPUs. A checkpoint "
        "has all that is needed to go on: values and both averages, in fp32. How large is it, how "
        "large is the part of one GPU, and how long does it take to write it if each of the two "
        f"nodes writes {gb(disk, 0)} per second? How large is a file with the values "
        "alone, in bf16?",
        [
            f"(4 + 8) bytes × {billion(n)} = {gb(whole)}; gradients are not saved",
            f"One GPU: {gb(whole)} / 16 = {gb(whole / 16)}",
            f"{gb(whole)} / (2 × {gb(disk, 0)}/s) = {whole / 2 / disk:.0f} s",
            f"The values in bf16: 2 × {billion(n)} = {gb(2 * n)}",
        ],
        f"a GPU keeps {gb(mine)} of values and averages ({off(whole / 16, mine, 0.01)}).",
    )


def padding() -> Problem:
    lines, says = [], []
    for module, name in ((nn.Linear(1000, 1001), "the layer"), (nn.LayerNorm(768), "the norm")):
        params = sum(p.numel() for p in module.parameters())
        shard = ceil(params / 1024)
        zeros = shard * 1024 - params
        with cluster("h100", nodes=128):
            inside = nn.Linear(1000, 1001) if name == "the layer" else nn.LayerNorm(768)
            found = next(FSDP(inside).parameters()).numel()
        assert found == shard, (found, shard)
        lines.append(f"{name.capitalize()}: {params:,} / 1,024, rounded up, are {shard:,} numbers "
                     f"on each; 1,024 × {shard:,} − {params:,} = {zeros:,} zeros, "
                     f"{percent(part := zeros / (zeros + params), 1 + (part < 0.01))}")  # fmt: skip
        says.append(f"{found:,} numbers in the shard of {name}")
    return Problem(
        "Padding",
        "On 1,024 GPUs one unit is a linear layer from 1,000 to 1,001 features, with its bias, and "
        "another one is a layer norm with 768 weights and as many biases. A unit is padded with "
        "zeros until it can be divided by the number of ranks. How long is a shard of each, and "
        "how much of what is sent are zeros?",
        lines,
        f"{' and '.join(says)}. So small units are better part of larger ones.",
    )


# --------------------------------------------------------------------------------------- time


def time_of_a_gather() -> Problem:
    _, unit, _ = sizes("gpt-7b")
    bandwidth = REACHED * 1600e9 / 8
    alpha = sheet.latency(32, 4)
    formula = sheet.gather(2 * unit, bandwidth, 32, 4)
    _, gpu = run("--model gpt-7b --gpu a100-80 --nodes 4 --network 1600 --batch 1 --seq 512")
    found = next(op.end - op.start for op in operators(gpu)
                 if op.sent and op.label == "all-gather 'blocks.12'")  # fmt: skip
    return Problem(
        "The time of a gather",
        f"A block of {unit / 1e6:.0f} million parameters is gathered in bf16 by 32 GPUs on 4 "
        "nodes. The network moves 1,600 Gbit/s for each node, of which 80 % are reached. A step of "
        "the ring takes 3 µs inside a node and 12 µs from one node to the next. How long does the "
        "gather take, and how much of it is latency?",
        [
            f"Latency, 31 steps: 27 × 3 µs + 4 × 12 µs = {alpha * 1e3:.2f} ms",
            f"Bytes: 2 × {unit / 1e6:.0f} million × 31/32 = {gb(2 * unit * 31 / 32, 3)}, at "
            f"0.8 × 200 = {bandwidth / 1e9:.0f} GB/s in {(formula - alpha) * 1e3:.2f} ms",
            f"Together {formula * 1e3:.2f} ms, and {percent(alpha / formula)} of it is latency",
        ],
        f"{found * 1e3:.2f} ms ({off(formula, found, 0.01)}).",
    )


def mfu_of_a_log_line() -> Problem:
    n, *_ = sizes("gpt-1.3b")
    found = train(f"{SIXTEEN} --batch 4 --seq 1024")
    step = round(found["step"], 3)
    speed = 4096 / step
    plain, peak = sheet.mfu(n, speed, GPUS["a100-80"].flops), GPUS["a100-80"].flops
    more = sheet.attention_flops(24, 2048, 1024, 1)
    formula = (6 * n + more) * speed / peak
    return Problem(
        "MFU from a line of a log",
        f"The log of a training on 16 A100 says `step 1200 | loss 2.41 | {step:.3f} s`. The model "
        f"has {billion(n)} parameters, in 24 layers of width 2,048. A step is 64 sequences of "
        "1,024 tokens. What is the MFU, without and with the operations of attention?",
        [
            f"Tokens per second of a GPU: 64 × 1,024 / 16 / {step:.3f} = {speed:,.0f}",
            f"6 × {billion(n)} × {speed:,.0f} = {6 * n * speed / 1e12:.0f} Tflops, of "
            f"{peak / 1e12:.0f}: {percent(plain, 1)}",
            f"Attention: 12 × 24 × 2,048 × 1,024 = {more / 1e9:.2f} Gflops for a token, beside "
            f"{6 * n / 1e9:.2f}; with them {percent(formula, 1)}",
        ],
        f"{percent(found['MFU'], 1)}, with attention ({off(formula, found['MFU'], 0.02)}: the "
        "table of positions has parameters, and nothing is multiplied with it).",
    )


SIXTEEN = "--model gpt-1.3b --gpu a100-80 --nodes 2 --network 400"


def tokens_and_days() -> Problem:
    n, *_ = sizes("gpt-1.3b")
    found = train(f"{SIXTEEN} --batch 8 --seq 1024")
    share = round(found["MFU"], 2)
    peak = GPUS["a100-80"].flops
    each = 6 * n + sheet.attention_flops(24, 2048, 1024, 1)
    speed = share * peak / each
    total = 20 * n
    days, measured = (total / 16 / s / 86400 for s in (speed, found["tokens/s per GPU"]))
    return Problem(
        "How long will it take?",
        f"With 8,192 tokens on each GPU the same training has an MFU of {percent(share)}, "
        "attention included. You want to train on 20 tokens for each parameter, on the same 16 "
        "GPUs. How many tokens per second is that, and how many days?",
        [
            f"A token: 6 × {billion(n)} and attention, {each / 1e9:.2f} Gflops",
            f"{percent(share)} of {peak / 1e12:.0f} Tflops / {each / 1e9:.2f} Gflops = "
            f"{speed:,.0f} tokens per second of a GPU",
            f"20 × {billion(n)} tokens / (16 × {speed:,.0f}) = {total / 16 / speed:,.0f} s = "
            f"{days:.2f} days",
        ],
        f"{found['tokens/s per GPU']:,.0f} tokens per second and {measured:.2f} days "
        f"({off(days, measured, 0.03)}). Saving, failures and evaluation come on top.",
    )


def when_gathers_hide() -> Problem:
    bandwidth = REACHED * 400e9 / 8
    formula = sheet.enough_tokens(reached("h100"), bandwidth, 32)
    words = "--model gpt-1.3b --gpu h100 --nodes 4 --network 400 --seq 1024 --batch"
    few, many = train(f"{words} 4"), train(f"{words} 16")
    waits = [found["exposed communication"] / found["step"] for found in (few, many)]
    assert 4096 < formula < 16384 and waits[0] > 1 / 3 and waits[1] < 0.1, waits
    return Problem(
        "When do gathers hide?",
        "A model is sharded over 4 nodes of 8 H100. Large products reach "
        f"{reached('h100') / 1e12:.0f} Tflops, and the network 80 % of 400 Gbit/s for each node. "
        "Each GPU has 4,096 tokens in a step. Are the gathers hidden, from how many tokens on are "
        "they, and does the size of the model matter?",
        [
            f"B = 0.8 × 400 / 8 = {bandwidth / 1e9:.0f} GB/s",
            f"T\\* = 2/2 × {reached('h100') / 1e12:.0f}e12 / {bandwidth / 1e9:.0f}e9 × 31/32 = "
            f"{formula:,.0f} tokens",
            f"4,096 are {percent(4096 / formula)} of that, so they are not hidden. The model's "
            "size has cancelled out",
        ],
        f"a GPT of 1.3 billion waits for the network for {percent(waits[0])} of the step with "
        f"4,096 tokens, and for {percent(waits[1])} with 16,384.",
    )


def size_of_units() -> Problem:
    n, unit, root = sizes("gpt-1.3b")
    words = "--model gpt-1.3b --gpu a100-80 --nodes 4 --network 1600 --batch 2 --seq 1024 --unit"
    (blocks, blocks_gpu), (whole, whole_gpu) = run(f"{words} block"), run(f"{words} model")
    alpha, bandwidth = sheet.latency(32, 4), REACHED * 1600e9 / 8
    part = 31 / 32 * 2
    sent = [part * (3 * n - root), part * 2 * n]
    seconds = [74 * alpha + sent[0] / bandwidth, 2 * alpha + sent[1] / bandwidth]
    memory = [2 * (root + unit), 2 * n]
    gathered = [most(gpu)["gathered parameters"] for gpu in (blocks_gpu, whole_gpu)]
    found = [figures["communication"] for figures in (blocks, whole)]
    words = [off(*pair, 0.02) for pair in zip(seconds, found, strict=True)]
    with_own = 33 / 32  # a chunk of one's own in bf16 is there beside what is gathered
    off(memory[0] * with_own, gathered[0], 0.03), off(memory[1] * with_own, gathered[1], 0.03)
    return Problem(
        "Units: latency against memory",
        f"On 32 A100 with 1,600 Gbit/s for each node, the latency of a collective is "
        f"{alpha * 1e3:.2f} ms. The GPT of {billion(n)} parameters has 24 blocks of "
        f"{unit / 1e6:.0f} million and a root of {root / 1e6:.0f} million. Each block is a unit, "
        "or the whole model is one, which is then gathered once and kept until its backward. How "
        "long is the network busy in a step of bf16, and how much is gathered at once?",
        [
            f"Blocks: 25 gathers in the forward, 24 in the backward and 25 reductions, 74 × "
            f"{alpha * 1e3:.2f} ms = {74 * alpha * 1e3:.0f} ms of latency; {gb(sent[0])} at "
            f"{bandwidth / 1e9:.0f} GB/s, {sent[0] / bandwidth * 1e3:.0f} ms; together "
            f"{seconds[0] * 1e3:.0f} ms",
            f"One unit: 2 × {alpha * 1e3:.2f} ms, and {gb(sent[1])} in "
            f"{sent[1] / bandwidth * 1e3:.0f} ms; together {seconds[1] * 1e3:.0f} ms",
            f"Gathered: 2 × ({root / 1e6:.0f} + {unit / 1e6:.0f}) million = {gb(memory[0], 2)} "
            f"against 2 × {billion(n)} = {gb(memory[1], 2)}",
        ],
        f"the network is busy for {found[0] * 1e3:.0f} ms ({words[0]}) and {found[1] * 1e3:.0f} ms "
        f"({words[1]}), with {gb(gathered[0], 2)} and {gb(gathered[1], 2)} gathered. And yet a "
        f"step takes {blocks['step'] * 1e3:.0f} ms with blocks and {whole['step'] * 1e3:.0f} ms "
        "with one unit: a gather of everything has nothing to hide behind.",
    )


def accumulation() -> Problem:
    n, _, root = sizes("gpt-1.3b")
    words = "--model gpt-1.3b --gpu a100-80 --nodes 2 --network 100 --batch 2 --seq 1024"
    found = {
        (strategy, waits): train(f"{words} --accumulate 4 --no-sync {waits} --strategy {strategy}")
        for strategy in ("full_shard", "shard_grad_op")
        for waits in ("no", "yes")
    }
    once = 2 * n * 15 / 16
    less = 2 * root * 15 / 16
    counts = {("full_shard", "no"): 12, ("full_shard", "yes"): 9,
              ("shard_grad_op", "no"): 8, ("shard_grad_op", "yes"): 2}  # fmt: skip
    sent = {key: count * once for key, count in counts.items()}
    for key, formula in sent.items():
        again = 4 * less if key[0] == "full_shard" else 0
        off(formula - again, found[key]["bytes sent"], 0.002)
    full, waiting = (found["full_shard", waits] for waits in ("no", "yes"))
    more = waiting["peak allocated"] - full["peak allocated"]
    steps = [f"{figures['step']:.2f}" for figures in found.values()]
    return Problem(
        "Accumulating gradients",
        f"The GPT of {billion(n)} parameters accumulates four micro-batches on 16 GPUs, in bf16. "
        "How many bytes does a GPU send in a step with `FULL_SHARD` and with `SHARD_GRAD_OP`, if "
        "each micro-batch is reduced at once, and if the first three are in `no_sync()`? What "
        "does `no_sync()` cost in memory, if the gradients that wait are in bf16?",
        [
            f"One gather or reduction: 2 × {billion(n)} × 15/16 = {gb(once, 2)}",
            f"`FULL_SHARD`: 4 × 3 = 12 of them, {gb(12 * once)}; with `no_sync()` 4 × 2 + 1 = 9, "
            f"{gb(9 * once)}",
            f"`SHARD_GRAD_OP`: 4 × 2 = 8, {gb(8 * once)}; in `no_sync()` it keeps what is "
            f"gathered, so 2, {gb(2 * once)}",
            f"Gradients of all parameters that wait: 2 × {billion(n)} = {gb(2 * n)}",
        ],
        ", ".join(gb(figures["bytes sent"]) for figures in found.values())
        + f", in this order (with `FULL_SHARD` 4 × {gb(less, 2)} less, because the root is "
        f"gathered once), and {gb(more)} more memory ({off(2 * n, more, 0.02)}). Where the network "
        f"has 100 Gbit/s, the steps take {', '.join(steps)} s.",
    )


def offload() -> Problem:
    n, unit, root = sizes("gpt-7b")
    gpu_of = GPUS["a100-40"]
    bandwidth = REACHED * gpu_of.pcie
    _, gpu = run("--model gpt-7b --gpu a100-40 --gpus 1 --batch 1 --seq 1024 --offload yes")
    copies = [op for op in operators(gpu) if op.label.startswith("upload")]
    once = next(op.end - op.start for op in copies if "blocks.12" in op.label)
    busy = sum(op.end - op.start for op in copies)
    formula, block = 4 * (2 * n - root) / bandwidth, 4 * unit / bandwidth
    tokens = block / (2 * unit / reached("a100-40"))
    assert 16_000 < tokens < 17_000
    (begun,) = (e for e in last_step(gpu.tape)[0] if isinstance(e, Phase) and e.name == "optimizer")
    steps = last_step(gpu.tape)[2] - begun.launched
    return Problem(
        "The bandwidth of offload",
        f"{billion(n)} parameters in fp32 live on the host of one A100 with 40 GB, and each block "
        f"of {unit / 1e6:.0f} million is uploaded for the forward and again for the backward. Only "
        f"the root, {root / 1e6:.0f} million, is uploaded once. PCIe reaches "
        f"{bandwidth / 1e9:.1f} GB/s, and products {reached('a100-40') / 1e12:.0f} Tflops. How "
        "long is a block's upload, how long do all uploads of a step take, and from how many "
        "tokens on does the forward of a block take longer than the upload of the next one?",
        [
            f"A block: 4 × {unit / 1e6:.0f} million = {gb(4 * unit, 2)}, / {bandwidth / 1e9:.1f} "
            f"GB/s = {block * 1e3:.0f} ms",
            f"A step: 4 × (2 × {n / 1e9:.2f} − {root / 1e9:.2f}) billion = "
            f"{gb(4 * (2 * n - root))}, {formula:.2f} s",
            f"The forward takes 2 × {unit / 1e6:.0f} million × T / "
            f"{reached('a100-40') / 1e12:.0f} Tflops; {block * 1e3:.0f} ms at T = {tokens:,.0f}",
        ],
        f"an upload takes {once * 1e3:.0f} ms ({off(block, once, 0.01)}), all of them "
        f"{busy:.2f} s ({off(formula, busy, 0.01)}). After that the host "
        f"still needs {steps:.2f} s for AdamW.",
    )


def hybrid_on_a_slow_network() -> Problem:
    n, _, root = sizes("gpt-1.3b")
    words = "--model gpt-1.3b --gpu h100 --nodes 4 --network 100 --batch 4 --seq 1024 --strategy"
    full, hybrid = train(f"{words} full_shard"), train(f"{words} hybrid_shard")
    bandwidth, alpha = REACHED * 100e9 / 8, sheet.latency(32, 4)
    compute = round(full["compute"], 3)
    whole = 2 * (3 * n - root) * 31 / 32 / bandwidth
    formula = whole + 74 * alpha
    reduced = 2 * 2 * n * 3 / 4 / bandwidth
    between = compute / 3 + reduced
    gain = full["step"] / hybrid["step"]
    return Problem(
        "Hybrid sharding on a slow network",
        f"The GPT of {billion(n)} parameters runs on 4 nodes of 8 H100, with 100 Gbit/s for each "
        f"node, of which 80 % are reached. A step computes for {compute * 1e3:.0f} ms. With "
        f"`FULL_SHARD` there are 74 collectives with a latency of {alpha * 1e3:.2f} ms each, and "
        f"the root of {root / 1e6:.0f} million is gathered once. About how long is a step with "
        "`FULL_SHARD`, and with `HYBRID_SHARD`, whose gathers take next to no time, but whose "
        "gradients are all-reduced between the nodes?",
        [
            f"`FULL_SHARD`: 2 × (3 × {n / 1e9:.2f} − {root / 1e9:.2f}) billion × 31/32 at "
            f"{bandwidth / 1e9:.0f} GB/s = {whole:.2f} s, and with 74 × {alpha * 1e3:.2f} ms of "
            f"latency {formula:.2f} s, in which the network is always busy",
            "`HYBRID_SHARD`: each GPU all-reduces an eighth, and the eight GPUs of a node share "
            f"its network. So 2 × 2 × {billion(n)} × 3/4 cross it, {reduced:.2f} s",
            f"No gradient is there before the forward is done: {compute / 3:.2f} + {reduced:.2f} = "
            f"{between:.2f} s, {formula / between:.1f} times as fast",
        ],
        f"{full['step']:.2f} s ({off(formula, full['step'], 0.05)}) and {hybrid['step']:.2f} s "
        f"({off(between, hybrid['step'], 0.05)}), {gain:.1f} times as fast.",
    )


def limit_and_reserved() -> Problem:
    n, unit, root = sizes("gpt-7b")
    words = "--model gpt-7b --gpu h100 --nodes 8 --network 3200 --batch 1 --seq 1024 --limit"
    free, two = train(f"{words} none"), train(f"{words} 2")
    every = 2 * (2 * n - root)
    formula = every - 2 * (root + unit)
    found = free["peak reserved"] - two["peak reserved"]
    alive = free["peak unsharded units"]
    assert free["peak allocated"] == two["peak allocated"] and 32 < alive < 65
    return Problem(
        "The limit, and reserved memory",
        f"A GPT of {billion(n)} parameters has 32 blocks of {unit / 1e6:.0f} million and a root of "
        f"{root / 1e6:.0f} million, on 64 H100. Without a limit the host runs so far ahead that "
        "hardly any gathered block can have the memory of one before it, in the forward or in the "
        "backward. With a limit of two units there are the root and one block. How much more is "
        "reserved without a limit, at most, and does the allocated memory show it?",
        [
            f"All gathers of a step: 2 × (2 × {n / 1e9:.2f} − {root / 1e9:.2f}) billion = "
            f"{gb(every)}",
            f"With the limit: 2 × ({root / 1e9:.2f} + {unit / 1e9:.2f}) billion = "
            f"{gb(2 * (root + unit))}",
            f"At most {gb(formula)} more. Not allocated: for the host each block is freed before "
            "the next is gathered",
        ],
        f"{gb(free['peak reserved'])} are reserved without a limit and {gb(two['peak reserved'])} "
        f"with it, {gb(found)} more ({off(formula, found, 0.2)}): {alive} of the 65 gathered units "
        f"have memory at one time. {gb(two['peak allocated'])} are allocated in both.",
    )


PROBLEMS: list[Callable[[], Problem]] = [
    memory_by_strategy,
    largest_model,
    bytes_of_a_step,
    savings_of_bf16,
    checkpoints,
    padding,
    time_of_a_gather,
    mfu_of_a_log_line,
    tokens_and_days,
    when_gathers_hide,
    size_of_units,
    accumulation,
    offload,
    hybrid_on_a_slow_network,
    limit_and_reserved,
]


HEAD = """\
<!-- made by tutorials/problems.py -->

[All pages](README.md) · [the sheet of formulas](30_formulas.md) · [program](problems.py)

# Fifteen problems

Each of them takes a pencil, [the sheet of formulas](30_formulas.md#the-sheet) and a few minutes.
They become harder. Open an answer when you have one of your own. Below its arithmetic stands what
the virtual GPU says, and in brackets how far that is from what was computed. A GB has 1e9 bytes.
"""


def wrapped(paragraph: str, indent: str = "") -> str:
    return textwrap.fill(paragraph, 100, subsequent_indent=indent, break_on_hyphens=False)


def text() -> str:
    """The page. Runs everything."""
    farthest.clear()
    parts = [HEAD]
    for number, problem in enumerate(PROBLEMS, 1):
        title, question, answer, says = problem()
        print(f"{number:2} {title}", flush=True)
        lines = "\n".join(wrapped(f"- {line}.", "  ") for line in answer)
        parts.append(
            f"## {number}. {title}\n\n{wrapped(question)}\n\n"
            f"<details><summary>Answer</summary>\n\n{lines}\n\n"
            f"{wrapped(f'The virtual GPU: {says}')}\n\n</details>\n"
        )
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(text())
    print(f"the farthest run is {percent(max(farthest), 1)} from its answer")


if __name__ == "__main__":
    main()

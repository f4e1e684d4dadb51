"""What one can work out about a training on paper: the formulas of page 30, of problems.py and of
calculator.html.

Bytes, seconds and floating-point operations, without prefixes: a GB is 1e9 here. ``params`` are a
model's parameters, ``tokens`` those on each GPU in a step, ``ranks`` the GPUs, ``reached`` the
operations per second that large products reach, ``bandwidth`` the bytes per second that the slowest
link reaches.
"""

from math import ceil

STEP_INSIDE, STEP_ACROSS = 3e-6, 12e-6
"""Seconds that a step of a ring takes, inside a node and from one to the next, however little it
moves: page 22."""


def sharers(strategy: str, ranks: int, per_node: int = 8) -> int:
    """How many ranks share one copy of parameters, gradients and Adam's averages."""
    if strategy == "no_shard":
        return 1
    return min(per_node, ranks) if strategy == "hybrid_shard" else ranks


def state(params: float, sharers: int, each: int = 16) -> float:
    """Bytes of a rank: 4 for a value, 4 for its gradient, 8 for Adam's two averages, in fp32.

    While AdamW steps, ``each`` is 20: it has one more tensor as large as all values.
    """
    return each * params / sharers


def gathered(strategy: str, params: float, root: float, unit: float, dtype_bytes: int = 2) -> float:
    """Bytes of whole parameters at once, if the limit is two units: the root, and another one."""
    if strategy == "no_shard":
        return dtype_bytes * params if dtype_bytes < 4 else 0  # a cast; in fp32 they are there
    if strategy in ("full_shard", "hybrid_shard"):
        return dtype_bytes * (root + unit)
    return dtype_bytes * params


def sent(params: float, ranks: int, gathers: int = 2, dtype_bytes: int = 2) -> float:
    """Bytes that a rank sends in a step: gathers, and one reduce-scatter of as many bytes.

    FULL_SHARD gathers twice, SHARD_GRAD_OP once; DDP's all-reduce sends as much as once.
    """
    return (gathers + 1) * dtype_bytes * params * (ranks - 1) / ranks


def sent_by_hybrid(params: float, per_node: int, nodes: int, dtype_bytes: int = 2) -> float:
    """The same for HYBRID_SHARD: FULL_SHARD in a node, an all-reduce of a shard between nodes."""
    inside = sent(params, per_node, 2, dtype_bytes)
    return inside + sent(params / per_node, nodes, 1, dtype_bytes)


def latency(ranks: int, nodes: int = 1) -> float:
    """Seconds of a gather or reduce-scatter of next to nothing."""
    across = min(nodes, ranks - 1) if nodes > 1 else 0
    return across * STEP_ACROSS + (ranks - 1 - across) * STEP_INSIDE


def gather(nbytes: float, bandwidth: float, ranks: int, nodes: int = 1) -> float:
    """Seconds to gather so many bytes, or to reduce and scatter them; an all-reduce takes two."""
    return latency(ranks, nodes) + nbytes * (ranks - 1) / ranks / bandwidth


def flops(params: float, tokens: float, recomputes: bool = False) -> float:
    """Of a step: 2 in the forward, 4 in the backward, and 2 more if the forward runs again."""
    return (8 if recomputes else 6) * params * tokens


def attention_flops(layers: int, width: int, length: int, tokens: float) -> float:
    """What comes on top: the products of queries, keys and values, of sequences of this length."""
    return 12 * layers * width * length * tokens


def enough_tokens(reached: float, bandwidth: float, ranks: int, dtype_bytes: int = 2) -> float:
    """T*: from so many on each GPU on, a unit is computed with for as long as one is gathered."""
    return dtype_bytes / 2 * reached / bandwidth * (ranks - 1) / ranks


def step(compute: float, gathers: float, reductions: float) -> float:
    """Seconds of a step with FULL_SHARD: a third of the computation is the forward's."""
    return max(compute / 3, gathers) + max(2 * compute / 3, gathers + reductions)


def mfu(params: float, tokens_per_second: float, peak: float) -> float:
    """Model flops utilization: of what the GPU's data sheet says, the share that trains."""
    return 6 * params * tokens_per_second / peak


def tokens_per_second(params: float, mfu: float, peak: float) -> float:
    """Of one GPU, at a given share."""
    return mfu * peak / (6 * params)


def gpus_at_least(params: float, memory: float, others: float = 0) -> int:
    """So that AdamW can step: 20 bytes for each parameter, shared, beside ``others``."""
    return ceil(20 * params / (memory - others))


def activations(
    layers: float, width: float, tokens: float, dtype_bytes: int = 2, values: int = 16
) -> float:
    """Bytes that a forward keeps for its backward, but for logits.

    ``values`` are those of each token, in widths, that a block keeps: in a GPT the residual twice,
    both of its norms, queries, keys, values and what attention returns, and eight in the MLP, which
    is four times as wide. Llama 2 keeps about 23, Llama 3, whose MLP is wider, about 25. A block
    that is computed again keeps 1, its input. After the blocks there are two more. The scores of
    attention are not kept (flash attention).
    """
    return dtype_bytes * width * tokens * (values * layers + 2)


def moments(
    strategy: str,
    params: float,
    root: float,
    unit: float,
    layers: float,
    width: float,
    vocabulary: float,
    tokens: float,
    sharers: int,
    dtype_bytes: int = 2,
    values: int = 16,
) -> tuple[tuple[float, ...], ...]:
    """The memory of a rank by kind, at the four moments of a step at one of which it is highest.

    The kinds: parameters, gradients, Adam's averages, gathered parameters, whole gradients,
    activations, temporary. The moments: where the backward begins, with three copies of the logits
    in fp32 (what the softmax returned, its gradient, and that of what went in); in the backward of
    the head; of the last block but one, whose gradient is put together while that of the last one
    is being reduced; and while AdamW steps. With a limit of two units and flash attention.
    """
    kept_by_rank = state(params, sharers, 4)
    averages, b, copy = 2 * kept_by_rank, dtype_bytes, 4 * vocabulary * tokens
    whole = gathered(strategy, params, root, unit, b)
    head = b * vocabulary * width  # its gradient
    saved = activations(layers, width, tokens, b, values)
    later = activations(layers - 2, width, tokens, b, values) - 2 * b * width * tokens
    # The root is not needed any more, and of the blocks two are gathered, or all.
    blocks = gathered(strategy, params - root, 0, 2 * unit, b)
    return (
        (kept_by_rank, 0, averages, whole, 0, saved + copy, 2 * copy),
        (kept_by_rank, 0, averages, whole, 0, saved, b * vocabulary * tokens + head),
        (kept_by_rank, 4 * unit / sharers, averages, blocks, 3 * b * unit + head, later, 0),
        (kept_by_rank, kept_by_rank, averages, 0, 0, 0, kept_by_rank),
    )

"""Flatten: python tutorials/02_flatten.py; the page is 02_flatten.md."""

# %% [markdown]
# # Flatten: twelve tensors, one message
#
# A layer of a transformer as wide as BERT has twelve parameters: four matrices, with 99.9 % of its
# numbers, and eight biases and norms. FSDP keeps a part of them on every rank, and has to gather
# them all before the layer can run. Here are 16 virtual GPUs on two nodes, and an all-gather for
# each parameter. Guess how long the small ones take.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import strips
from torch import nn

from minifsdp.comm.collectives import all_gather
from minifsdp.flatten import flatten, unflatten
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op

PICTURE = Path(__file__).with_suffix(".svg")
LAYER = nn.TransformerEncoderLayer(768, 12, 3072, device="meta")
SIZES = {name: param.numel() for name, param in LAYER.named_parameters()}
TOTAL = sum(SIZES.values())
SHAPES = [torch.Size([2, 3]), torch.Size([2])]  # of nn.Linear(3, 2)


# %%
def gather_times(sizes: list[int]) -> list[float]:
    """Microseconds, of an all-gather for each size."""
    with cluster(nodes=2) as gpu:
        for size in sizes:
            chunk = torch.empty(-(-size // 16))  # fp32; rounded up
            all_gather(torch.empty(16 * len(chunk)), chunk, dist.group.WORLD, tag=0)()
    return [(op.end - op.start) * 1e6 for op in gpu.tape if isinstance(op, Op) and op.sent]


def one_by_one() -> None:
    times = gather_times([*SIZES.values()])
    for (name, size), time in zip(SIZES.items(), times, strict=True):
        print(f"{name:26} {size:9,} numbers {time:6,.0f} µs")
    print(f"{'twelve messages':26} {TOTAL:9,} numbers {sum(times):6,.0f} µs")
    print(f"{'the same in one':26} {TOTAL:9,} numbers {sum(gather_times([TOTAL])):6,.0f} µs")


# %% [markdown]
# A message has a price of its own, whatever is in it: its *latency*. Here it is 63 µs. (Pieces go
# round a ring of 16 ranks in 15 steps: 13 of 3 µs within a node, 2 of 12 µs over the network.) The
# largest matrix has 3,000 times the numbers of a norm, and takes 4.5 times as long. The small ones
# take a third of the time, and twelve messages twice as long as one with everything in it.
#
# ## One tensor
#
# So lay the parameters end to end in one 1-D tensor, the *flat tensor*, and let the layer compute
# with *views* of it: tensors that have a shape and a place to begin, and no memory of their own.
#
# {{ minifsdp/flatten.py flatten }}
#
# {{ minifsdp/flatten.py unflatten }}


# %%
def shared_memory() -> None:
    weight, bias = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([7.0, 8.0])
    flat = flatten([weight, bias])
    weight, bias = unflatten(flat, SHAPES)
    print("weight begins at", weight.storage_offset(), "and bias at", bias.storage_offset())
    weight[1, 0] = 40
    print(flat.tolist())


# %% [hidden]
def draw() -> None:
    times = gather_times([*SIZES.values()])
    views = unflatten(torch.empty(TOTAL, device="meta"), [p.shape for p in LAYER.parameters()])
    flat, apart = [], []
    for name, view, time in zip(SIZES, views, times, strict=True):
        colour, short = "blue" if view.dim() > 1 else "orange", name.removeprefix("self_attn.")
        flat.append((view.numel() / TOTAL, colour, f"{short}: {view.storage_offset():,}"))
        apart.append((time / sum(times), colour, short))
    rows = [
        ("the flat tensor: parameters as long as they are, and the places where they begin", []),
        ("numbers", flat),
        ("their all-gather: messages as long as they take", []),
        ("twelve messages", apart),
        ("one message", [(gather_times([TOTAL])[0] / sum(times), "purple", "all in one")]),
    ]
    legend = {"blue": "matrices", "orange": "biases and norms"}
    strips(PICTURE, "a transformer layer's twelve parameters", rows, legend)


# %% [markdown]
# ![Above, four wide blue boxes with hairlines of orange between them. Below, twelve boxes, of which
# eight orange ones take up a third; and a purple box, half as long.](02_flatten.svg)
#
# The one thing to notice: orange is all but invisible above, where it is numbers, and a third of
# the strip below, where it is time.
#
# ## Where the gradient goes
#
# To autograd, making a view is an operation like any other. Its backward puts the view's gradient
# into its place in the flat tensor's. So the flat tensor gets one gradient for the whole layer,
# ready to be sent in one message:


# %%
def by_views() -> None:
    layer, flat = nn.Linear(3, 2), torch.zeros(8, requires_grad=True)
    for name, view in zip(("weight", "bias"), unflatten(flat, SHAPES), strict=True):
        delattr(layer, name)  # the parameter; the layer will ask for self.weight,
        setattr(layer, name, view)  # and does not care what it gets
    layer(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    print("flat.grad is", flat.grad.tolist())
    print("parameters of the layer:", [*layer.parameters()])


# %% [markdown]
# The layer has no parameters any more. The flat tensor is what the optimizer has to be given.
#
# ## What breaks without it
#
# There is a shorter way to make parameters use other memory: assign to their `.data`.


# %%
def by_data() -> None:
    layer, flat = nn.Linear(3, 2), torch.zeros(8, requires_grad=True)
    for param, view in zip(layer.parameters(), unflatten(flat, SHAPES), strict=True):
        param.data = view.data
    layer(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.optim.SGD([flat], lr=1.0).step()
    print("flat.grad is", flat.grad)
    print("after the optimizer's step the weight is", layer.weight.tolist())


# %% [markdown]
# Nothing has complained. The memory is shared, so the forward is right, and a step on the flat
# tensor would change the layer. But `.data` is memory without history. Autograd stops at the
# layer's own parameters and leaves the gradients there, in as many tensors as before. The optimizer
# finds none, and a parameter without a gradient is one that it skips.
#
# Not all can share. A tensor has one dtype, is on one device, and gets a gradient or does not.
# minifsdp refuses a mixture, by name. (`use_orig_params=True` allows one of the last: page 26.)
#
# ## Predict, then run
#
# 1. A bias is not used in the forward. In plain PyTorch its `grad` is then None, and the optimizer
#    leaves it alone. What gradient do its numbers get in the flat tensor?
# 2. If FSDP did not refuse: what becomes of a bfloat16 matrix, flattened with an fp32 bias?
# 3. Ten layers in one flat tensor instead of ten: is their all-gather much faster?


# %%
def answers() -> None:
    flat = torch.ones(8, requires_grad=True)
    unflatten(flat, SHAPES)[0].sum().backward()
    assert flat.grad.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # 1. zeros; weight decay changes it
    mixed = flatten([torch.ones(4, dtype=torch.bfloat16), torch.ones(2)])
    assert mixed.dtype is torch.float32  # 2. twice the bytes, and nobody was told
    ten, one = sum(gather_times([TOTAL] * 10)), sum(gather_times([TOTAL * 10]))
    assert 0.9 < one / ten < 0.95  # 3. no, by 8 %; and all ten are in memory at once


# %% [hidden]
def main() -> None:
    one_by_one()
    shared_memory()
    draw()
    by_views()
    by_data()
    answers()


if __name__ == "__main__":
    main()

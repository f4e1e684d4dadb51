"""Flatten: python tutorials/02_flatten.py; the page is 02_flatten.md."""

# %% [markdown]
# # Flatten: twelve tensors, one message
#
# A block of our GPT has twelve parameters. Four are matrices, and have 99.9 % of its numbers. The
# other eight are small: biases, and the weights of norms. FSDP keeps a part of them on every rank,
# and has to gather them all before the block can run. Here is such a block, 768 wide, on 16 virtual
# GPUs in two nodes, and an all-gather for each parameter. What share of the time do the eight small
# ones take? Guess before you read on.

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import strips
from torch import nn
from train_gpt import Block

from minifsdp.core.collectives import TorchCollectives
from minifsdp.core.flatten import flatten, unflatten
from minifsdp.sim import cluster
from minifsdp.sim.tape import Op

PICTURE = Path(__file__).with_suffix(".svg")
with torch.device("meta"):
    BLOCK = Block(768)
SIZES = {name: param.numel() for name, param in BLOCK.named_parameters()}
TOTAL = sum(SIZES.values())
SHAPES = [torch.Size([2, 3]), torch.Size([2])]  # of nn.Linear(3, 2)


# %%
def gather_times(sizes: list[int]) -> list[float]:
    """Microseconds, of an all-gather for each size."""
    with cluster(nodes=2) as gpu:
        for size in sizes:
            chunk = torch.empty(-(-size // 16))  # fp32; rounded up
            full = torch.empty(16 * len(chunk))
            TorchCollectives().all_gather(None, full, chunk, dist.group.WORLD)()
    return [(op.end - op.start) * 1e6 for op in gpu.tape if isinstance(op, Op) and op.sent]


def one_by_one() -> None:
    times = gather_times([*SIZES.values()])
    for (name, size), time in zip(SIZES.items(), times, strict=True):
        print(f"{name:26} {size:9,} numbers {time:6,.0f} µs")
    print(f"{'twelve messages':26} {TOTAL:9,} numbers {sum(times):6,.0f} µs")
    print(f"{'the same in one':26} {TOTAL:9,} numbers {sum(gather_times([TOTAL])):6,.0f} µs")


# %% [markdown]
# A message takes some time however little is in it: its *latency*. Here it is 63 µs. (In an
# all-gather pieces go round a ring of 16 ranks in 15 steps. In this model of a cluster 13 of the
# steps stay within a node and take 3 µs each, and 2 go over the network and take 12 µs.) So the
# largest matrix, with 3,072 times the numbers of a norm, takes only 4.5 times as long. The eight
# small messages take a third of the time, and the twelve together twice as long as one message with
# everything in it.
#
# ## One tensor
#
# So we lay the parameters end to end in one 1-D tensor, the *flat tensor*, and let the block
# compute with *views* of it. A view is a tensor that shows a part of another one. It has a shape
# and a place where it begins, and no memory of its own.
#
# {{ minifsdp/core/flatten.py flatten }}
#
# {{ minifsdp/core/flatten.py unflatten }}
#
# Slices of the flat tensor, such as `flat[:6].view(2, 3)`, are views too, and are right in
# `build.4`. `flatten.2` wants them from one `split`: then the gradients of all views arrive at one
# operation, and the engine can take them there.


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
    views = unflatten(torch.empty(TOTAL, device="meta"), [p.shape for p in BLOCK.parameters()])
    flat, apart = [], []
    for name, view, time in zip(SIZES, views, times, strict=True):
        colour, short = "blue" if view.dim() > 1 else "orange", name.removesuffix(".weight")
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
    strips(PICTURE, "the twelve parameters of a block", rows, legend)
    small = [size < 10_000 for size in SIZES.values()]
    taken = sum(time for time, yes in zip(times, small, strict=True) if yes) / sum(times)
    assert sum(small) == 8 and 0.3 < taken < 0.36  # a third of the time, and of the numbers
    held = sum(size for size, yes in zip(SIZES.values(), small, strict=True) if not yes) / TOTAL
    assert round(held, 3) == 0.999 and max(SIZES.values()) / min(SIZES.values()) == 3072
    assert round(max(times) / min(times), 1) == 4.5 and sum(times) / gather_times([TOTAL])[0] > 1.9
    assert 13 * 3 + 2 * 12 == 63 == round(min(times)) and 13 + 2 == 15 == 16 - 1


# %% [markdown]
# ![Above, four wide blue boxes with hairlines of orange between them. Below, twelve boxes, of which
# eight orange ones take up a third; and a purple box, half as long.](02_flatten.svg)
#
# Orange is what is small. In the first strip, which shows numbers, you can hardly see it. In the
# second, which shows time, it is a third.
#
# ## Where the gradient goes
#
# To autograd, making a view is an operation like any other, so it has a backward: it writes the
# gradient of the view into its place in the gradient of the flat tensor. So the flat tensor gets
# one gradient for everything in it, and that can be sent in one message, too. Here is one small
# layer:


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
# The layer has no parameters any more. What the optimizer has to be given is the flat tensor.
#
# (To write each gradient into its place is a copy. On a CPU minifsdp's engine saves it: there it
# sends the gradients of the views from where autograd has left them, and small ones together. See
# [`piece_views.py`](../minifsdp/support/piece_views.py).)
#
# ## What breaks without it
#
# The layer had to lose its parameters for this. There is a shorter way to let parameters use other
# memory, and it leaves them where they are: assign to their `.data`. What will the optimizer do?


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
# It does nothing: all weights are zeros, as before the step, and there was no error. The memory is
# shared, so the forward is right, and a step on the flat tensor would change the layer. But `.data`
# shares memory and no history. Autograd stops at the layer's own parameters and leaves the
# gradients there, in as many tensors as before. The optimizer finds no gradient of the flat tensor,
# and it skips parameters that have none. The model is never trained.
#
# Not all parameters can share a flat tensor. A tensor has one dtype, is on one device, and has a
# gradient or has none. minifsdp refuses a mixture and names the parameters. (With
# `use_orig_params=True` a mixture of the last kind is possible; see page [26](26_rows.md).)
#
# Where a parameter begins matters on a GPU. A product in bfloat16 takes an H100 up to eight times
# as long if the matrix does not begin at a multiple of 16 bytes
# ([measured](../minifsdp/sim/README.md#on-a-real-h100)). One bias of five numbers before it is
# enough for that. So minifsdp lays those parameters of a unit last whose length is no multiple of
# eight (`wrapping/build.py`). The core keeps the order of the module.
#
# ## Predict, then run
#
# 1. A bias is not used in the forward. In plain PyTorch its `grad` is then None, and the optimizer
#    leaves it alone. What gradient do its numbers get in the flat tensor?
# 2. Suppose FSDP did not refuse mixtures. What would become of a bfloat16 matrix that is flattened
#    together with an fp32 bias?
# 3. Ten blocks share one flat tensor instead of having one each. Is the all-gather much faster?
#
# <details><summary>Answers</summary>
#
# 1. Zeros. The optimizer does not skip what has a gradient of zeros: weight decay, for one, changes
#    the bias now. So training is no longer what it is without FSDP.
# 2. It becomes fp32, because that is the dtype in which both fit. It takes twice the bytes, in
#    memory and on the network, and nothing says so.
# 3. No, by 8 % only: to send a block of this size already takes long compared with the latency. And
#    all ten blocks would be in memory at once.
#
# </details>


# %% [hidden]
def answers() -> None:
    flat = torch.ones(8, requires_grad=True)
    unflatten(flat, SHAPES)[0].sum().backward()
    assert flat.grad.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]  # 1. zeros; weight decay changes it
    mixed = flatten([torch.ones(4, dtype=torch.bfloat16), torch.ones(2)])
    assert mixed.dtype is torch.float32  # 2. twice the bytes, and nobody was told
    ten, one = sum(gather_times([TOTAL] * 10)), sum(gather_times([TOTAL * 10]))
    assert round(1 - one / ten, 2) == 0.08  # 3. no, by 8 %; and all ten are in memory at once


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

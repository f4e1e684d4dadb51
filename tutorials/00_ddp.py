"""DDP: python tutorials/00_ddp.py; the page is 00_ddp.md."""

# %% [markdown]
# # DDP in forty lines, and why its memory does not scale
#
# A step takes a second, and you have two GPUs. Give each of them half of the batch, and it takes
# little more than half a second. That is *data parallel* training. Each GPU has a process of its
# own, called a *rank*, and a model of its own. All that they have to agree on is the gradient.
#
# This is PyTorch's DistributedDataParallel, without what makes it fast:

# %% [hidden]
from __future__ import annotations

import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate

PICTURE = Path(__file__).with_suffix(".svg")


# %%
class DDP(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for param in module.parameters():
            dist.broadcast(param.data, 0)  # everybody begins with what rank 0 has
            param.register_post_accumulate_grad_hook(self.average)

    def average(self, param: nn.Parameter) -> None:
        """Called by the backward, when a parameter's gradient is complete."""
        param.grad /= dist.get_world_size()
        dist.all_reduce(param.grad)  # the sum over all ranks, on all ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def train(wrap: type[nn.Module]) -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # other data on each rank, and, until DDP sees to it, another model
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        x = torch.randn(32, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weight, *_ = model.parameters()
    return losses, weight.flatten().tolist()


@on_ranks(2)
def ours_and_torchs() -> None:
    ours, torchs = train(DDP), train(TorchDDP)
    print(f"loss {ours[0][0]:.3f} ... {ours[0][-1]:.3f}, equal to torch's: {ours == torchs}")


# %% [markdown]
# (The decorator [starts two processes](launch.py) and prints what each says.) The losses differ,
# because the data do. What the ranks *learn* is the same: they began with the same parameters and
# step with the same gradients, so their models stay equal, though nobody looks.
#
# What torch's has on top: it sends gradients in buckets of 25 MB, not one by one, and while the
# backward is still computing the others.
#
# ## What breaks without it
#
# Leave out the line with `all_reduce`.


# %%
class Forgetful(DDP):
    def average(self, param: nn.Parameter) -> None:
        pass


@on_ranks(2)
def forgotten() -> list[float]:
    losses, weight = train(Forgetful)
    print(f"loss {losses[0]:.3f} ... {losses[-1]:.3f}")
    return weight


def apart() -> None:
    weights = zip(*forgotten(), strict=True)
    difference = max(abs(a - b) for a, b in weights)
    print(f"largest difference between the ranks' first weights: {difference:.2f}")


# %% [markdown]
# No error, and the loss goes down. Each rank trains a model of its own, on half of the data, and in
# the end one of them is saved. A published library has averaged parameters instead of gradients,
# [as a reader noticed](https://github.com/huggingface/picotron/issues/39): such a hook is given the
# parameter. It is seen only if somebody compares ranks that got *different* data.
#
# ## What it costs
#
# With Adam in fp32 there are sixteen bytes for each parameter: four for itself, four for its
# gradient, eight for Adam's two averages; and four more while torch's Adam steps. For 1.3 billion
# parameters these are 27 GB, on each rank. Here is what one GPU holds when it is fullest, under DDP
# and under FSDP (`FULL_SHARD`), where each GPU keeps a part only:


# %%
def memory(strategy: str, gpus: int) -> float:
    words = f"--model gpt-1.3b --precision fp32 --batch 1 --seq 256 --strategy {strategy}"
    nodes = f"--nodes {max(gpus // 8, 1)} --gpus {min(gpus, 8)}"
    gpu = simulate(parser().parse_args(f"{words} {nodes}".split()), steps=2)
    return gpu.report()["peak allocated"]


def compare() -> None:
    rows = {
        f"{name}, {gpus} GPUs": {"": memory(strategy, gpus) / 1e9}
        for name, strategy in (("DDP", "no_shard"), ("FSDP", "full_shard"))
        for gpus in (2, 8, 64)
    }
    bars(PICTURE, "memory of one GPU, 1.3 billion parameters", rows, "{:.1f} GB".format)


# %% [markdown]
# ![Six bars. The three of DDP, for 2, 8 and 64 GPUs, are of the same length, the three of FSDP get
# shorter and shorter.](00_ddp.svg)
#
# The one thing to notice: for DDP the number of GPUs does not matter. It makes training faster, but
# no model fits on 64 GPUs that does not fit on one. All 64 hold the same 27 GB, and do the same
# optimizer step with them. FSDP asks why 64 copies are needed.
#
# (These are *virtual* GPUs, which minifsdp brings along. They run the same code; page
# [09](09_streams.md) is about them.)
#
# ## Predict, then run
#
# 1. With plain SGD instead of Adam, how many bytes for each parameter?
# 2. All ranks are given the *same* data, and `all_reduce` is left out. Do they drift apart?


# %%
@on_ranks(2)
def same_data() -> list[float]:
    model = Forgetful(nn.Linear(4, 1))
    model(torch.arange(4.0)).backward()  # the same on both ranks
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return next(model.parameters()).flatten().tolist()


def answers() -> None:
    layer = nn.Linear(1000, 1000)
    layer(torch.ones(1000)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.step()
    held = [*layer.parameters(), *(p.grad for p in layer.parameters())]
    assert not any(optimizer.state.values())
    assert sum(t.nbytes for t in held) == 8 * 1000 * 1001  # 1. eight
    assert len({*map(tuple, same_data())}) == 1  # 2. no, which is how the mistake stays hidden


# %% [hidden]
def main() -> None:
    ours_and_torchs()
    apart()
    compare()
    answers()


if __name__ == "__main__":
    main()

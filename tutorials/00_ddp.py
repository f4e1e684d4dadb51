"""DDP: python tutorials/00_ddp.py; the page is 00_ddp.md."""

# %% [markdown]
# # DDP in forty lines, and why its memory does not scale
#
# A training step takes a second, and you have two GPUs. Give each of them half of the batch, and
# the step takes little more than half a second. That is *data parallel* training. Each GPU gets a
# process of its own, called a *rank*, and each rank has a model of its own. After the backward pass
# every rank has different gradients, because it saw different data. What must the ranks agree on
# before the optimizer steps, and what happens if they do not?
#
# PyTorch's DistributedDataParallel (DDP) averages the gradients. Here is the idea, without what
# makes it fast. A *hook* is a function that PyTorch calls for you at a certain moment; this one is
# called when the gradient of a parameter is complete.

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
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from train_gpt import CONTEXT, GPT

from minifsdp.sim.__main__ import parser
from minifsdp.sim.cli.run import simulate

PICTURE = Path(__file__).with_suffix(".svg")
TEXTS = ("0123456789" * 20, "abcdefghijklmnopqrstuvwxyz" * 8)  # rank 0's data, rank 1's


def rows(text: str, count: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens ``[count, CONTEXT]`` of this text, and those that come next."""
    tokens = torch.tensor([*text.encode()])
    batch = torch.stack([tokens[i : i + CONTEXT + 1] for i in range(count)])
    return batch[:, :-1], batch[:, 1:]


def loss_on(model: nn.Module, text: str) -> Tensor:
    tokens, following = rows(text)
    return cross_entropy(model(tokens).flatten(0, 1), following.flatten())


# %%
class DDP(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for param in module.parameters():
            dist.broadcast(param.data, 0)  # every rank begins with the values of rank 0
            param.register_post_accumulate_grad_hook(self.average)

    def average(self, param: nn.Parameter) -> None:
        """The hook: this parameter's gradient is complete."""
        param.grad /= dist.get_world_size()  # the number of ranks
        dist.all_reduce(param.grad)  # the sum over all ranks, on all ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def train(wrap: type[nn.Module]) -> tuple[nn.Module, list[float]]:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # until DDP broadcasts, each rank has another model
    model = wrap(GPT(layers=4, width=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses = []
    for _ in range(25):
        loss = loss_on(model, TEXTS[rank])  # other data on each rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@on_ranks(2)
def ours_and_torchs() -> None:
    (_, ours), (_, torchs) = train(DDP), train(TorchDDP)
    print(f"loss {ours[0]:.1f} ... {ours[-1]:.1f}, equal to torch's: {ours == torchs}")


# %% [markdown]
# (The decorator [starts two processes](launch.py) and prints what each says. The model is the GPT
# of `make demo`, from [train_gpt.py](train_gpt.py): four blocks, 128 wide, 867,072 parameters. You
# will meet it on most pages. The data are simple here: rank 0's text has digits only, `0123456789`
# again and again, and rank 1's the alphabet. `loss_on` is in [the program](00_ddp.py).)
#
# The losses of the ranks differ, because the data do. The models do not: they begin with the same
# parameters and step with the same gradients, so they stay equal, and no rank has to check.
#
# PyTorch's DDP does two more things. It sends gradients in buckets of 25 MB
# ([documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html))
# instead of one by one, and it sends them while the backward is still computing the others.
#
# ## What breaks without it
#
# Leave out the line with `all_reduce`, and train again. Will the loss go down more slowly? Then
# rank 0 saves its model, as usual, and both texts are used to test it.


# %%
class Forgetful(DDP):
    def average(self, param: nn.Parameter) -> None:
        pass


@on_ranks(2)
def tested() -> list[float]:
    found = []
    for wrap in (DDP, Forgetful):
        model, losses = train(wrap)
        digits, letters = (loss_on(model, text).item() for text in TEXTS)
        if dist.get_rank() == 0:
            print(
                f"{wrap.__name__:9} training loss {losses[-1]:4.1f}. The saved model: "
                f"digits {digits:4.1f}, letters {letters:4.1f}"
            )
        found += [losses[-1], digits, letters]
    return found


# %% [markdown]
# There is no error, and the training loss is *lower* than the right one: each rank learns half of
# the task, which is easier. But the model that is saved has never learned anything about letters.
# Guessing blindly among 256 tokens would give it a loss of 5.5. Half of the data and half of the
# GPUs were for nothing, and nobody who looks at the loss curve can see it.
#
# It happens. A published library has averaged parameters instead of gradients, because such a hook
# is given the parameter, [as a reader of it
# noticed](https://github.com/huggingface/picotron/issues/39). You see it only if you compare ranks
# that got *different* data.
#
# ## What it costs
#
# AdamW in fp32 needs sixteen bytes for each parameter: four for itself, four for its gradient, and
# eight for the two averages that Adam keeps. While torch's AdamW steps on a GPU, it needs four
# more. These twenty bytes are 17 MB for our GPT. For one of 1.3 billion parameters they are 27 GB,
# on each rank. Here is what one GPU holds at its fullest, under DDP and under FSDP (its strategy
# `FULL_SHARD`), where each GPU keeps only a part of the parameters, the gradients and the
# averages:


# %%
def memory(strategy: str, gpus: int) -> float:
    words = f"--model gpt-1.3b --precision fp32 --batch 1 --seq 256 --strategy {strategy}"
    nodes = f"--nodes {max(gpus // 8, 1)} --gpus {min(gpus, 8)}"
    gpu = simulate(parser().parse_args(f"{words} {nodes}".split()), steps=2)
    return gpu.report()["peak allocated"]


# %% [hidden]
def compare() -> None:
    held = {
        f"{name}, {gpus} GPUs": {"": memory(strategy, gpus) / 1e9}
        for name, strategy in (("DDP", "no_shard"), ("FSDP", "full_shard"))
        for gpus in (2, 8, 64)
    }
    bars(PICTURE, "memory of one GPU, 1.3 billion parameters", held, "{:.1f} GB".format)
    peaks = [row[""] for row in held.values()]
    assert max(peaks[:3]) - min(peaks[:3]) < 0.05 and round(peaks[0]) == 27
    assert peaks[3] > peaks[4] > peaks[5]


# %% [markdown]
# ![Six bars of the memory of one GPU. The three of DDP, for 2, 8 and 64 GPUs, are of the same
# length, 27 GB. The three of FSDP get shorter with the number of GPUs.](00_ddp.svg)
#
# (A *node* is a machine, here with up to 8 GPUs. These GPUs are *virtual*: `simulate` runs the same
# code on a model of GPUs that minifsdp brings along. Page [09](09_streams.md) is about it.)
#
# For DDP the number of GPUs does not matter. More of them make training faster, but a model that
# does not fit on one does not fit on 64 either. All 64 hold the same 27 GB, and do the same
# optimizer step with them. FSDP begins with the question why there are 64 copies.
#
# (Which FSDP? PyTorch has two. FSDP1 wraps modules and makes one flat parameter of each unit. FSDP2
# is the function `fully_shard`, which keeps each parameter apart, and which PyTorch's documentation
# recommends to newcomers. In a step both do the same. These pages explain it with flat parameters,
# which are simpler to send, and come to `fully_shard` on page [25](25_fsdp2.md).)
#
# ## Predict, then run
#
# 1. With plain SGD instead of AdamW, how many bytes are there for each parameter?
# 2. All ranks are given the *same* data, and `all_reduce` is left out. Do they drift apart?
# 3. What is missing if the line with `broadcast` is left out, but not the one with `all_reduce`?
#
# <details><summary>Answers</summary>
#
# 1. Eight: four for the parameter and four for its gradient. Plain SGD keeps nothing else.
# 2. No. Equal models with equal data have equal gradients. So a test that gives all ranks the same
#    batch cannot notice that the averaging is missing.
# 3. The ranks begin at different places and get equal gradients, so at the end their models
#    differ by nearly as much as at the beginning. (AdamW's weight decay makes the difference
#    smaller, by 0.05 %.) Again there is no error.
#
# </details>


# %% [hidden]
class Unequal(DDP):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self.average)


@on_ranks(2)
def small(wrap: str, same: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0 if same else dist.get_rank())
    kind = {"Forgetful": Forgetful, "Unequal": Unequal}[wrap]
    model = kind(nn.Linear(4, 1, bias=False))
    before = model.module.weight.flatten().tolist()
    model(torch.arange(4.0)).backward()  # the same on both ranks
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return before, model.module.weight.flatten().tolist()


def answers() -> None:
    layer = nn.Linear(1000, 1000)
    layer(torch.ones(1000)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.step()
    held = [*layer.parameters(), *(p.grad for p in layer.parameters())]
    assert not any(optimizer.state.values())
    assert sum(t.nbytes for t in held) == 8 * 1000 * 1001  # 1. eight
    (_, first), (_, second) = small("Forgetful", True)
    assert first == second  # 2. no
    ranks = torch.tensor(small("Unequal", False))
    assert ranks[0, 1].ne(ranks[1, 1]).all()
    apart = ranks[0] - ranks[1]
    assert torch.allclose(apart[0], apart[1], atol=1e-6)  # 3. as far apart as before, with SGD
    shrunk = 1 - (1 - 0.002 * 0.01) ** 25  # by AdamW: lr * weight_decay in each of 25 steps
    assert round(100 * shrunk, 2) == 0.05  # per cent


# %% [hidden]
def main() -> None:
    ours_and_torchs()
    right, right_digits, right_letters, wrong, _, wrong_letters = tested()[0]
    assert wrong < right and right_letters < 2 < 5.5 < wrong_letters and right_digits < 2
    assert sum(p.numel() for p in GPT(4, 128).parameters()) == 867_072
    assert round(20 * 867_072 / 1e6) == 17 and round(torch.tensor(256.0).log().item(), 1) == 5.5
    compare()
    answers()


if __name__ == "__main__":
    main()

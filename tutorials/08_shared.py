"""Shared weights: python tutorials/08_shared.py; the page is 08_shared.md."""

# %% [markdown]
# # A weight in two places
#
# Many language models use one matrix twice: as the embedding, which turns tokens into vectors, and
# as the head, which turns vectors into scores for tokens. The two are *tied*. In PyTorch that is
# one assignment: `head.weight = token.weight`. But FSDP takes each parameter out of its module and
# puts it into the flat tensor of a unit. Which unit gets the tied weight, and what do the two
# modules see?

# %% [hidden]
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

warnings.filterwarnings("ignore", "Failed to initialize NumPy")

import torch
import torch.distributed as dist
from draw import bars
from launch import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_gpt import GPT, Block

from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy

PICTURE = Path(__file__).with_suffix(".svg")


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (AttributeError, ValueError) as error:
        return textwrap.fill(str(error), 90)
    return ""


# %%
def tied(layers: int = 4) -> GPT:
    gpt = GPT(layers, width=128)
    gpt.head.weight = gpt.token.weight
    return gpt


@on_ranks(2)
def owners() -> None:
    gpt = tied()
    model = FSDP(gpt, auto_wrap_policy=ModuleWrapPolicy({Block}))
    seen: list[Any] = []
    for module in (gpt.token, gpt.head):
        module.register_forward_hook(lambda module, *_: seen.append(module.weight))
    model(torch.arange(8)[None]).sum().backward()
    if dist.get_rank() == 0:
        root = model.engine.units[0]
        print("in the root:", {info.name: len(info.owners) for info in root.param_infos})
        print("in the forward, one tensor:", seen[0] is seen[1], type(seen[0]).__name__)
        print("later:", type(gpt.token.weight).__name__)
        print(refusal(lambda: gpt.token.weight.norm()))


# %% [markdown]
# The numbers count *owners*, the modules that have a parameter. The tied weight is in the root's
# flat tensor once, and has two owners. During the forward both see the same view, and autograd adds
# up the gradients of both uses.
#
# After the step both see a *placeholder*, an object that has a shape and a message but no values.
# Without it, a module that is called at the wrong time would compute with freed memory. This method
# gives a view to all owners:
#
# {{ minifsdp/support/param_views.py Placeholders.show -Otherwise -pop(FLAT_PARAM -hidden, unit
# -if not tensors -if unit.leaks -attributes = -found = -if found -__setattr__ is -if hidden }}
#
# ## What breaks without it
#
# An embedding is large. Why not make it a unit of its own, so that it is freed while the blocks are
# computed? Then its weight is in that unit's flat tensor, and the head's weight is in the root's.
# minifsdp refuses this. Here we switch off the two checks that refuse it, train a GPT of two blocks
# to name the next letter of the alphabet, save it, and load it into a plain model. What do you
# expect the loss to be?


# %%
def loss(model: nn.Module, letters: Tensor) -> Tensor:
    following = (letters + 1) % 26  # in the alphabet
    return cross_entropy(model(letters).flatten(0, 1), following.flatten())


@on_ranks(2)
def embedding_apart() -> dict[str, float]:
    rank, alphabet, found = dist.get_rank(), torch.arange(26).view(2, 13), {}
    for units, kinds in {"blocks": {Block}, "blocks, embeddings": {Block, nn.Embedding}}.items():
        torch.manual_seed(0)
        with patch.multiple("minifsdp.wrapping.build", check_sharing=DEFAULT, set_unit=DEFAULT):
            model = FSDP(tied(layers=2), auto_wrap_policy=ModuleWrapPolicy(kinds))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        for _ in range(40):
            loss(model, alphabet[[rank]]).backward()
            optimizer.step()
            optimizer.zero_grad()
        plain, saved = tied(layers=2), model.state_dict()
        plain.load_state_dict(saved)
        apart = (saved["token.weight"] - saved["head.weight"]).abs().max()
        found[f"{units}: trained"] = loss(model, alphabet).item()
        found[f"{units}: loaded"] = loss(plain, alphabet).item()
        if rank == 0:
            print(f"units: {units}. The two weights differ by up to {apart:.2f}")
    refused = refusal(lambda: FSDP(tied(layers=2), auto_wrap_policy=ModuleWrapPolicy(kinds)))
    if rank == 0:
        print(refused)
    return found


# %% [hidden]
def draw() -> None:
    found, _ = embedding_apart()
    rows = {f"units: {name}": {"": value} for name, value in found.items()}
    bars(
        PICTURE, "loss of the trained model, and of the model that loaded it", rows, "{:.2f}".format
    )
    right, loaded, wrong, wrong_loaded = found.values()
    assert right == loaded and wrong < 0.05 and wrong_loaded > 5 * max(right, wrong)


# %% [markdown]
# ![Four bars of the loss. With blocks as units it is the same after loading. With the embeddings as
# units as well, it is just as small during training, and many times as large after
# loading.](08_shared.svg)
#
# Two weights that began as copies have drifted apart. In training this looks like a success: the
# loss is as low as with blocks. But the plain model has one weight for both places. It keeps
# whichever it loads last, so it is not the model that was trained. You find out only when you use
# the checkpoint.
#
# PyTorch's first FSDP does exactly this ([seen with torch 2.13](../tests/test_lessons.py)). With
# `use_orig_params=True` its forward fails instead. minifsdp refuses before it has changed anything,
# and says what to do.
#
# ## Predict, then run
#
# 1. Before its weights were tied, the GPT had 867,072 parameters. How many does it have now that
#    the tied weight is counted once?
# 2. The embedding and the head are tied. You wrap each of them in `FSDP` by itself, without a
#    policy, and do not wrap the model around them. Is that refused?
#
# <details><summary>Answers</summary>
#
# 1. 834,304: the head's 32,768 are now the embedding's. The optimizer, too, keeps its averages for
#    them only once.
# 2. Yes, when you wrap the second one: its weight is already in the first one's unit.
#
# </details>


# %% [hidden]
@on_ranks(2)
def answers() -> None:
    numel = sum(param.numel() for param in GPT(4, 128).parameters())
    assert (numel, numel - 256 * 128, 256 * 128) == (867_072, 834_304, 32_768)
    assert sum(param.numel() for param in tied().parameters()) == 834_304  # 1. less the head's
    gpt = tied()
    FSDP(gpt.token)
    assert refusal(lambda: FSDP(gpt.head))  # 2. yes


# %% [hidden]
def main() -> None:
    owners()
    draw()
    answers()


if __name__ == "__main__":
    main()

"""listed_modules.py: several modules as one unit, against DistributedDataParallel."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import minifsdp
from minifsdp import FSDPModule, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.between_steps.explain import table
from minifsdp.support.listed_modules import ListedModules, is_open
from tests.ranks import device, on_ranks


class Model(nn.Module):
    """A small GPT: an embedding, blocks, a norm, and a head that may be tied to the embedding.

    Args:
        run: in which way the parts run.
    """

    def __init__(self, tied: bool = False, run: str = "as usual"):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.run = run
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words, backwards: bool = False):
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if self.run == "other order" and backwards:
            return self.norm(self.head(x) @ self.embed(words).transpose(1, 2) @ x)
        if self.run == "head twice":
            return self.head(self.norm(x)) + self.head(x)
        if self.run == "norm alone":
            return self.norm(x)
        if self.run == "checkpointed":
            x = checkpoint(self.norm, x, use_reentrant=False)
            return checkpoint(self.head, x, use_reentrant=False)
        if self.run == "checkpointed together":
            return checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=True)
        return self.head(self.norm(x))


def build(**settings) -> Model:
    torch.manual_seed(0)
    return Model(**settings).to(device())


def sharded(lists, frozen=(), shard=fully_shard, how=None, **settings) -> Model:
    model = build(**settings)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    for names in lists:
        shard([model.get_submodule(name) for name in names], **(how or {}))
    for block in model.blocks:
        if not isinstance(block, FSDPModule):
            shard(block)
    shard(model)
    return model


def train(model, steps=4, forward=None) -> list[torch.Tensor]:
    """The losses and, at the end, the gradients of the last step and the parameters."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        words = torch.randint(11, (4, 5), device=device())
        loss = (forward or type(model).__call__)(model, words).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found + [whole(p.grad) for p in params] + [whole(p.detach()) for p in params]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathers(model, forward) -> int:
    before = model._engine.stats.all_gathers
    forward()
    return model._engine.stats.all_gathers - before


LAST = ("norm", "head")
CASES = {
    "norm and head": ([LAST], {}),
    "stay after forward": ([LAST], {"how": {"reshard_after_forward": False}}),
    "tied": ([("embed", "head")], {"tied": True}),
    "all of the tied": ([("embed", "norm", "head")], {"tied": True}),
    "two lists": ([LAST, ("blocks.0", "blocks.1")], {}),
    "blocks": ([("blocks.2", "blocks.0")], {}),
    "one runs twice": ([LAST], {"run": "head twice"}),
    "one of tied runs twice": ([("embed", "head")], {"run": "head twice"}),
    "in another order": ([("head", "norm")], {}),
    "checkpointed": ([LAST], {"run": "checkpointed"}),
    "checkpointed together": ([LAST], {"run": "checkpointed together"}),
    "twice in the list": ([("norm", "head", "norm")], {}),
    "one of them frozen": ([LAST], {"frozen": ["norm"]}),
    "all of them frozen": ([LAST, ("blocks.0", "blocks.1")], {"frozen": ["blocks.0", "blocks.1"]}),
    "a list of one": ([("head",)], {}),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_bit_equal_to_ddp(case):
    lists, settings = CASES[case]
    settings = dict(settings)
    frozen, how = settings.pop("frozen", ()), settings.pop("how", None)
    plain = build(**settings)
    for name in frozen:
        plain.get_submodule(name).requires_grad_(False)
    expected = train(DDP(plain))
    found = train(sharded(lists, frozen, how=how, **settings))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)

"""Models that nobody would think of writing by hand, against the same model unsharded.

They found mistakes that no written test had: parameters listed twice, views of a step before, units
whose module runs inside of itself. A seed is the same model and the same settings on every rank.
"""

import copy
import os
import random

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifsdp.core import BackwardPrefetch, ForwardPrefetch, ShardingStrategy

from .common import Block, full_gradients, full_parameters, on_ranks, sharded

WIDTH, SEEDS = 4, int(os.environ.get("SEEDS", 60))


class Part(nn.Module):
    """Other parts, one after the other: some skipped over by a sum, run twice or run again in a
    checkpoint; and perhaps outputs in nested containers, of which not all are in the loss."""

    def __init__(self, chance: random.Random, depth: int) -> None:
        super().__init__()
        self.kinds: list[str] = []
        self.parts = nn.ModuleList()
        for _ in range(chance.randint(1, 3)):
            part: nn.Module = leaf(chance)
            if depth and chance.random() < 0.6:
                part = Part(chance, depth - 1)
            if chance.random() < 0.5:
                part = Block(part)
            if chance.random() < 0.15:
                part.requires_grad_(False)
            self.parts.append(part)
            # Twice in the innermost only: to add up three gradients or more, the order counts.
            twice = "sum" if depth else "twice"
            self.kinds.append(chance.choice(["once", "once", "sum", twice, "again", "aside"]))
        self.nested = depth == 2 and chance.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        for part, kind in zip(self.parts, self.kinds, strict=True):
            if kind == "again":
                x = checkpoint(part, x, use_reentrant=False)
            elif kind == "aside":
                part(x)  # nobody needs this
            else:
                y = part(x)
                y = part(y) if kind == "twice" else y
                x = x + y if kind == "sum" else y
        return {"out": (x, [x.square()])} if self.nested else x


def leaf(chance: random.Random) -> nn.Module:
    kinds = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH)),
        nn.Tanh,
    ]
    return chance.choice(kinds)()


def alike(module: nn.Module) -> bool:
    """Whether a parameter would be in two units, or some of a unit would be frozen: the core
    refuses that."""
    try:
        sharded(copy.deepcopy(module))
    except ValueError:
        return False
    return True


def compare(seed: int) -> bool:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Part(chance, 2), nn.Linear(WIDTH, WIDTH))
    plain = nn.Sequential(Block(plain[0]), Block(plain[1])) if seed % 3 else plain[:2]
    settings = {
        "sharding_strategy": chance.choice([*ShardingStrategy][:3]),
        "backward_prefetch": chance.choice([None, *BackwardPrefetch]),
        "forward_prefetch": chance.choice([False, *ForwardPrefetch]),
        "limit_all_gathers": chance.choice([1, 2, 3, False]),
    }
    if not alike(plain):
        return False
    model = sharded(copy.deepcopy(plain), **settings)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, model)]
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(3, WIDTH)
        losses = []
        for one in (plain, model):
            out = one(x)
            out = out["out"][1][0] if isinstance(out, dict) else out
            losses.append(out.tanh().square().mean())  # bounded, however large the outputs get
            if losses[-1].requires_grad and (step != 1 or seed % 4):
                losses[-1].backward()  # else nobody goes through this graph
        assert torch.equal(*losses), (seed, step, settings)
        for param in plain.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad.div_(2))
        grads = full_gradients(model)
        for name, param in plain.named_parameters():
            found = torch.zeros_like(param) if grads[name] is None else grads[name]
            wanted = torch.zeros_like(param) if param.grad is None else param.grad
            assert torch.equal(found, wanted), (seed, step, name, settings)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # A parameter without a gradient beside one with: zeros in a flat one, None in a plain one. SGD
    # without weight decay makes no difference of it.
    found = full_parameters(model)
    assert all(torch.equal(found[n], p) for n, p in plain.named_parameters()), (seed, settings)
    with torch.no_grad():
        model(x)
    for unit in model.engine.units:
        freed = not unit.unsharded.needs_unshard or unit.unsharded.storage.size() == 0
        assert freed and not unit.reasons, (seed, unit.label, unit.reasons, settings)
    return True


@on_ranks(2)
def test_random_models_are_equal_to_plain_ones():
    compared = sum(map(compare, range(SEEDS)))
    assert compared >= SEEDS // 2, compared

"""Promises about parameters that a loss does not use: they get no gradient, not even zeros, if no
rank has used them. So neither weight decay nor momentum changes them, as with
DistributedDataParallel(find_unused_parameters=True).

In chunks a unit has one gradient. These programs are for rows and for ``fully_shard``.
"""

from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp import CPUOffload, ModuleWrapPolicy, ShardingStrategy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.comm import collectives
from tests.promises import Block, batch, ddp, seeded
from tests.ranks import device, on_ranks
from tests.small import replaced

STEPS = 6


class Experts(Block):
    """Each step goes through some of the layers, which the ranks choose."""

    def __init__(self, experts=3, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.never = nn.Parameter(torch.ones(1, width))  # fewer rows than ranks

    def forward(self, x, chosen):
        x = torch.tanh(self.first(x))
        for number in chosen:
            x = x + self.experts[number](x)
        return x


class Model(nn.Module):
    def __init__(self, uses_second=True):
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.head, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)
        self.uses_second = uses_second

    def forward(self, x, chosen):
        first, second = self.blocks
        x = first(x, chosen)
        y = second(second(x, chosen[1:]), chosen)  # another choice in each call
        return self.head(y if self.uses_second else x)


def by_rank(step):
    """An expert that all use, one that this rank alone uses, or none."""
    return [[0], [0, 1 + dist.get_rank() % 2], [2 * (dist.get_rank() == 0)], []][step % 4]


def rows(**settings):
    settings = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True, **settings}
    return lambda module: FSDP(module.to(device()), **settings)


def sharded(model):
    model.to(device())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


WRAPS = {
    "rows": rows(),
    "whole": rows(sharding_strategy=ShardingStrategy.NO_SHARD),
    "offloaded": rows(cpu_offload=CPUOffload(True)),
    "fully_shard": sharded,
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state(model):
    """Of each parameter its values and its gradient, or None."""
    named = [(name.removeprefix("module."), param) for name, param in model.named_parameters()]
    return {
        name: (whole(p.detach()).clone(), None if p.grad is None else whole(p.grad).clone())
        for name, p in named
    }


def with_gradient(model):
    return {name: grad is not None for name, (_, grad) in state(model).items()}


def trained(optimizer, chosen=by_rank, some_skip=False, every=1, **settings):
    def program(wrap):
        model = wrap(Model(uses_second=not some_skip or dist.get_rank() == 0))
        stepped = optimizer(model.parameters(), lr=0.05, **settings)
        found = []
        for step in range(STEPS):
            model(batch(3, 6, step=step), chosen(step)).pow(2).sum().backward()
            found.append(state(model) if every == 1 else with_gradient(model))
            if step % every == every - 1:
                stepped.step()
                stepped.zero_grad()
        return found if every > 1 else (found, state(model))  # DDP rounds the sum in another way

    return program


def without_reduction(model):
    if hasattr(model, "no_sync"):
        return model.no_sync()
    stack = ExitStack()
    model.set_requires_gradient_sync(False)
    stack.callback(model.set_requires_gradient_sync, True)
    return stack


def accumulated(wrap):
    """Three backwards in each step. Only the last one is reduced."""
    model, found = wrap(Model()), []
    stepped = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        for micro in range(3):
            at = 3 * step + micro
            with without_reduction(model) if micro < 2 else nullcontext():
                model(batch(3, 6, step=at), by_rank(step + micro * (step > 3))).pow(
                    2
                ).sum().backward()
        found.append(
            {name: None if grad is None else param for name, (param, grad) in state(model).items()}
        )
        stepped.step()
        stepped.zero_grad()
    return found


def hooked(wrap):
    """How often a rank's own gradient reaches each parameter."""
    model, calls = wrap(Model()), Counter()
    for number, param in enumerate(model.parameters()):
        param.register_hook(lambda _, number=number: calls.update([number]))
    for step in range(STEPS):
        model(batch(3, 6, step=step), by_rank(step)).pow(2).sum().backward()
    return dict(calls)


PROGRAMS = {
    "weight decay": trained(torch.optim.AdamW, weight_decay=0.1),
    "momentum": trained(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "always the same": trained(torch.optim.AdamW, lambda _: [0], weight_decay=0.1),
    "none at all": trained(torch.optim.AdamW, lambda _: [], weight_decay=0.1),
    "other experts on each rank": trained(torch.optim.AdamW, lambda _: [dist.get_rank() % 2]),
    "a block that one rank does not use": trained(torch.optim.AdamW, some_skip=True),
    "gradients of several steps": trained(torch.optim.AdamW, every=3),
    "gradients of several steps, reduced at the end": accumulated,
    "hooks": hooked,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_what_no_rank_uses_has_no_gradient(program, wrap):
    expected, found = (seeded(PROGRAMS[program], w) for w in (ddp, WRAPS[wrap]))
    # What is offloaded is on the host.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize("program", ["momentum", "gradients of several steps, reduced at the end"])
@on_ranks(2)
def test_with_torchs_own_collectives_too(program):
    expected = seeded(PROGRAMS[program], ddp)
    with replaced(collectives.direct, lambda device: False):
        found = seeded(PROGRAMS[program], rows())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

"""Ordinary PyTorch programs around the engine: each is right, or refused by name.

A *program* is a function that is written as users write it. It gets ``wrap``, which makes a module
parallel, and trains or inspects what comes back. It runs twice on every rank: with ``wrap`` being
DistributedDataParallel, and with minifsdp. A promise is one of two:

    same(program)                      both runs return the same, bit for bit
    refused(program, error, words)     minifsdp raises ``error`` on every rank, and its message has
                                       all of ``words``; nobody hangs, nobody crashes

The tables of programs are in the files beside this one, one for each part of a training script.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from minifsdp import FSDPModule, ModuleWrapPolicy, fully_shard
from minifsdp import FullyShardedDataParallel as FSDP
from tests.ranks import device


class Block(nn.Module):
    """Base of whatever should become a unit of its own."""


Wrap = Callable[[nn.Module], nn.Module]
Program = Callable[[Wrap], Any]


def ddp(module: nn.Module) -> nn.Module:
    """The reference. Unused parameters are ordinary: FSDP does not mind them either."""
    return DDP(module.to(device()), find_unused_parameters=True)


class Averaged(nn.Module):
    """A plain module whose gradients :func:`train` averages by hand, as DDP does; for programs that
    DDP refuses, such as those that use no output, or checkpoints that are reentrant."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.to(device())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def average(self) -> None:
        for param in self.parameters():
            if param.requires_grad:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad.div_(dist.get_world_size())
                dist.all_reduce(param.grad)


def fsdp(**settings: Any) -> Wrap:
    """Wrap each :class:`Block` and the root, unless ``settings`` say otherwise."""
    settings.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return lambda module: FSDP(module.to(device()), **settings)


def without_wrapper(module: nn.Module, **settings: Any) -> nn.Module:
    """The same units by ``fully_shard``, all with these arguments."""
    module = module.to(device())
    for inner in reversed([*module.modules()]):
        if isinstance(inner, Block) and inner is not module:
            fully_shard(inner, **settings)
    return fully_shard(module, **settings)


WAYS: dict[str, Wrap] = {
    "chunks": fsdp(),
    "rows": fsdp(use_orig_params=True),
    "fully_shard": without_wrapper,
}


def seeded(program: Program, wrap: Wrap) -> Any:
    """What ``program`` returns: from the same parameters on every rank, whatever it did before."""
    torch.manual_seed(0)
    return program(wrap)


def batch(*shape: int, step: int = 0) -> Tensor:
    """Other data on every rank and in every step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(device())


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters under their original names."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    if isinstance(model, FSDPModule):
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return {n.removeprefix("module."): p.detach().clone() for n, p in model.named_parameters()}


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    steps: int = 4,
    width: int = 6,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of all steps, and the parameters after them. More steps than are compared between
    ranks (see rank_agreement.py), so that the programs also run without that."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(3, width, step=step))
        loss.backward()
        if isinstance(model, Averaged):
            model.average()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, parameters(model)


def same(
    program: Program, reference: Wrap = ddp, wrap: Wrap | None = None, **settings: Any
) -> None:
    """To be run on every rank: both ways of making it parallel give the same results."""
    expected, found = seeded(program, reference), seeded(program, wrap or fsdp(**settings))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=False)


def refused(
    program: Program, error: type[Exception], words: list[str], **settings: Any
) -> Exception:
    """To be run on every rank: minifsdp raises ``error``, and says all of ``words``."""
    try:
        result = seeded(program, fsdp(**settings))
    except error as raised:
        missing = [word for word in words if not re.search(re.escape(word), str(raised))]
        assert not missing, f"the message does not say {missing}: {raised}"
        return raised
    raise AssertionError(f"not refused; the program returned {result}")

"""A small sharded model that tests of one concept take apart, and ways to watch it."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import minifsdp.core.reduce
import minifsdp.core.reshard
import minifsdp.core.unshard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from minifsdp.comm.unit_messages import DirectMessages
from minifsdp.core.collectives import TorchCollectives
from minifsdp.core.reduce import Reduction
from minifsdp.featured_unit import FeaturedUnit
from tests.ranks import device


def scripted(module: nn.Module) -> nn.Module:
    """Compiled by torch.jit.script, as programs still have it. torch warns of that: 2.13 that it is
    deprecated, 2.14 that it will be removed."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", ".*torch.jit.script", kind)
        return torch.jit.script(module)


class Block(nn.Sequential):
    """A unit of its own."""


class Scaled(nn.Linear):
    """One of its parameters has no dimensions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def layers(blocks: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [Block(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(width, width), *parts).to(device())


def stack(blocks: int = 4, width: int = 6, **settings) -> FSDP:
    """A root with one layer of its own and `blocks` units named '1', '2', ..."""
    return FSDP(layers(blocks, width), auto_wrap_policy=ModuleWrapPolicy({Block}), **settings)


def batch(width: int = 6, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, width, generator=generator).to(device())


def step(model: nn.Module, at: int = 0) -> Tensor:
    loss = model(batch(step=at)).pow(2).sum()
    loss.backward()
    return loss


def mean_gradients(model: nn.Module, *losses: Tensor) -> dict[str, Tensor]:
    """What DDP would leave in a plain `model`'s gradients: computed, then averaged by hand."""
    for param in model.parameters():
        param.grad = None
    sum(losses).backward()
    for param in model.parameters():
        if param.grad is not None:
            mean = param.grad.to(device()) / dist.get_world_size()
            dist.all_reduce(mean)
            param.grad.copy_(mean)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gathered_gradients(model: FSDP) -> dict[str, Tensor]:
    """The gradients that minifsdp has left, put together and under their original names."""
    if model.engine.units[0].mesh is not None:  # rows: DTensors, each with its gradient
        named = model.named_parameters()
        return {name: p.grad.full_tensor() for name, p in named if p.grad is not None}
    found = {}
    for unit in model.engine.units:
        grad = unit.sharded_flat_param.grad
        if grad is None or not unit.numel:
            continue
        padded = torch.zeros(unit.padded_shard.numel(), dtype=grad.dtype, device=device())
        padded[: grad.numel()] = grad  # with offload it comes from the host
        chunks = [padded]
        if unit.shard_group is not None:
            chunks = [torch.empty_like(padded) for _ in range(unit.shard_world_size)]
            dist.all_gather(chunks, padded, group=unit.shard_group)
        flat, start = torch.cat(chunks).to(grad.device), 0
        for info in unit.param_infos:
            name = f"{unit.name}.{info.name}" if unit.name else info.name
            found[name] = flat[start : start + info.shape.numel()].view(info.shape)
            start += info.shape.numel()
    return found


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        values = found[name].to(expected[name].device)  # what is offloaded is on the host
        torch.testing.assert_close(values, expected[name], rtol=1e-5, atol=1e-6)


def storage(unit: FeaturedUnit) -> int:
    """Bytes that the unit's full parameters take now."""
    return (
        0
        if unit.unsharded.flat_param is None
        else unit.unsharded.flat_param.untyped_storage().size()
    )


@contextmanager
def watch(model: FSDP) -> Iterator[list[str]]:
    """A log of what the engine does to units: '+name' for an unshard, '-name' for a reshard."""
    log: list[str] = []
    unshard, reshard = minifsdp.core.unshard.unshard, minifsdp.core.reshard.reshard

    def noted(sign, verb):
        def wrapper(unit, streams):
            log.append(sign + (unit.name or "root"))
            return verb(unit, streams)

        return wrapper

    with replaced(unshard, noted("+", unshard)), replaced(reshard, noted("-", reshard)):
        yield log


@contextmanager
def reductions() -> Iterator[list[Reduction]]:
    """The reductions that are started in here, in their order, also when they are over."""
    started: list[Reduction] = []

    def noted(*args):
        started.append(Reduction(*args))
        return started[-1]

    with replaced(Reduction, noted):
        yield started


@contextmanager
def travels(name: str, change: Callable[[Callable], Callable]) -> Iterator[None]:
    """Change how the tensors of units travel, whatever the device.

    Args:
        name: a method of :class:`~minifsdp.core.collectives.TorchCollectives`.
        change: makes of that another one, which gets ``(self, unit, ...)``.
    """
    with ExitStack() as stack:
        for kind in (DirectMessages, TorchCollectives):
            if hasattr(kind, name):  # an all-reduce of direct messages is halves.py
                stack.enter_context(patch.object(kind, name, change(getattr(kind, name))))
        yield


@contextmanager
def replaced(function: Callable, by: Callable) -> Iterator[None]:
    """Put another in the place of a function of minifsdp, in every file that has it by whatever
    name, so that tests need not know who calls it from where."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "minifsdp":
                for attribute, value in list(vars(module).items()):
                    if value is function:
                        stack.enter_context(patch.object(module, attribute, by))
        yield

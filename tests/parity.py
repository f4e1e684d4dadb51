"""The reference: train a case under DDP and under minifsdp, and compare."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import minifsdp.engine
import minifsdp.reduce
import minifsdp.unshard
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp import ModuleWrapPolicy
from tests.models import CASES, Case
from tests.ranks import device

STEPS = 3
BOUND = 2e-6
"""Largest difference from DDP with more than two ranks, relative to the largest element of a tensor
(at least 1). Both add up the same W gradients, in different orders: W - 1 additions, each off by
at most half of 2**-23 of the sum. At W = 4 that is 2e-7 a step, and there are three steps. The rest
is for what the network makes of a perturbed parameter. With two ranks the sums are the same
sums."""


def train(model: nn.Module, case: Case, steps: int = STEPS) -> list[Tensor]:
    """Momentum, because plain SGD forgets, and Adam hides a gradient that is off by a factor."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 * step + dist.get_rank())  # for dropout, too
        inputs = [tensor.to(device()) for tensor in case.inputs()]
        loss = case.loss(model(*inputs), *inputs)
        after_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def after_loss() -> None:
    """Nothing, unless :func:`delays` puts a pause here."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().to(device())


def sharded(case: Case, **settings: Any) -> FSDP:
    return FSDP(build(case), auto_wrap_policy=ModuleWrapPolicy(case.units), **settings)


@cache
def reference(name: str, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Tensor]]:
    case = CASES[name]
    model = DDP(build(case), find_unused_parameters=name in ("unused", "partial"))
    losses = train(model, case, steps)
    return losses, {n: p.detach().clone() for n, p in model.module.named_parameters()}


def full_parameters(model: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if not expected.numel() or torch.equal(found, expected):
        return 0.0
    gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    assert gap == gap, "NaN"
    return gap


def check_parity(name: str, steps: int = STEPS, **settings: Any) -> float:
    """Train case `name` both ways on this rank; the largest difference, if it is small enough."""
    losses, parameters = reference(name, steps)
    model = sharded(CASES[name], **settings)
    found_losses = train(model, CASES[name], steps)
    found = full_parameters(model)
    assert found.keys() == parameters.keys()
    bound = 0.0 if dist.get_world_size() <= 2 else BOUND
    worst = 0.0
    for step, (a, b) in enumerate(zip(found_losses, losses, strict=True)):
        gap = difference(a, b)
        assert gap <= bound, f"loss of step {step}: {a.item()} under minifsdp, {b.item()} under DDP"
        worst = max(worst, gap)
    for key, expected in parameters.items():
        gap = difference(found[key], expected)
        assert gap <= bound, f"{key} differs from DDP's by {gap:.3g} (relative), bound {bound:.3g}"
        worst = max(worst, gap)
    check_at_rest(model)
    return worst


def check_at_rest(model: FSDP) -> None:
    """After a step nothing is unsharded, and nothing is under way."""
    for unit in model.engine.units:
        if unit.sharded and unit.full is not None:
            assert unit.full.untyped_storage().size() == 0, f"{unit.label} was not freed"
    assert model.engine.stats.unsharded_units == 0


@contextmanager
def delays(where: str) -> Iterator[None]:
    """Make what usually is fast slow, so that whoever does not wait for it is found out."""

    def slowly(function: Any) -> Any:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            pause()
            return function(*args, **kwargs)

        return delayed

    def slow_to_finish(function: Any) -> Any:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, tuple):
                return result[0], slowly(result[1])
            return slowly(result)

        return delayed

    reduce, gather = minifsdp.reduce.reduce_scatter, minifsdp.unshard.all_gather
    patches = {
        "reduction": patch.object(minifsdp.reduce, "reduce_scatter", slow_to_finish(reduce)),
        "gather": patch.object(minifsdp.unshard, "all_gather", slow_to_finish(gather)),
        "loss": patch(f"{__name__}.after_loss", pause),
        "free": patch.object(minifsdp.engine, "reshard", slowly(minifsdp.engine.reshard)),
    }
    with patches[where]:
        yield


def pause() -> None:
    """A few milliseconds: of the host's time on a CPU, of the current stream's on a GPU."""
    if device().type == "cuda":
        torch.cuda._sleep(5_000_000)
    else:
        time.sleep(0.003)

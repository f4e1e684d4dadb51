"""The choice of units of a crooked model, for three sizes of memory, on a virtual GPU."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tutorials.exercises.catalog import Check
from tutorials.exercises.labs.measure import because, figure

STAGES = {512: 8, 1024: 4, 2560: 2}
"""Width of a stage's blocks, and how many there are."""
ROOM = (1.0, 1.1, 1.3)
"""Sizes of memory, as parts of what the default takes: a unit for each block."""
MOST_TRIALS = 25


class Trial(NamedTuple):
    """A training step with some choice of units."""

    seconds: float
    memory: int  # bytes reserved


def default_units(sizes: dict[str, int], memory: int, try_out: Any) -> set[str]:
    """Each block is a unit: the modules that have no other inside."""
    return {name for name in sizes if not any(other.startswith(f"{name}.") for other in sizes)}


def _model() -> nn.Module:
    """Stages of pairs of blocks; between two stages a linear layer, which is the root's."""
    from tutorials.exercises.virtual import Block

    layers: dict[str, nn.Module] = {}
    before = 0
    for width, number in STAGES.items():
        if before:
            layers[f"to{width}"] = nn.Linear(before, width)
        pairs = [nn.Sequential(Block(width), Block(width)) for _ in range(number // 2)]
        layers[f"stage{width}"], before = nn.Sequential(*pairs), width
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def _try_out(units: frozenset[str]) -> Trial:
    from minifsdp import CustomPolicy, FullyShardedDataParallel
    from minifsdp.sim import cluster

    with cluster(gpu="a100-40", nodes=4) as gpu:
        model = _model()
        chosen = {module for name, module in model.named_modules() if name in units}
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=CustomPolicy(chosen.__contains__)
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            wrapped(torch.empty(1024, min(STAGES))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
    return Trial(gpu.report()["step"], gpu.report()["peak reserved"])


def on_a_gpu() -> Iterator[Any]:
    """The student's function gets names and sizes, a size of memory, and something to try with."""
    from minifsdp.wrapping import policies
    from tutorials.exercises.virtual import Block

    choose: Callable[..., Any] = getattr(policies, "choose_units", default_units)
    with torch.device("meta"):
        modules = list(_model().named_modules())
    sizes = {
        name: sum(p.numel() * p.itemsize for p in module.parameters())
        for name, module in modules
        if isinstance(module, (Block, nn.Sequential)) and name
    }
    known: dict[frozenset[str], Trial] = {}
    calls = 0

    def try_out(units: Any) -> Trial:
        nonlocal calls
        key = frozenset(units)
        calls += key not in known
        if calls > MOST_TRIALS:
            raise RuntimeError(f"try_out() was asked for more than {MOST_TRIALS} choices")
        if key not in known:
            known[key] = _try_out(key)
        return known[key]

    usual = try_out(default_units(sizes, 0, None))
    total = 0.0
    for room in ROOM:
        memory = int(usual.memory * room)
        units = set(choose(dict(sizes), memory, try_out))
        result = known.get(frozenset(units)) or _try_out(frozenset(units))
        yield f"names that are no modules, with {room} x the memory", sorted(units - sizes.keys())
        yield f"it fits into {room} x the memory of the default", result.memory <= memory
        total += result.seconds
    yield figure(total * 1e3)


def _because(what: str, want: Any, got: Any) -> str | None:
    if "fits" in what:
        return "large units are gathered as a whole, and two of them are alive at a time"
    return because(what, want, got)


CHECKS = [Check(on_a_gpu, 1, 30, _because)]

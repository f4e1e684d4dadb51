"""races.py: no wait of the engine is missing, and none could be left out."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import minifsdp
from minifsdp import CPUOffload, MixedPrecision, ShardingStrategy
from tests.parity import grid
from tests.races import noting_device
from tests.ranks import device, on_ranks
from tests.small import batch, stack, step

OFFLOADS = {"": None, "offload": CPUOffload(True)}
PRECISIONS = {"": None, "bf16": MixedPrecision(torch.bfloat16, torch.float32)}
METHODS = ("wait", "wait_event", "synchronize", "record_use")


class Wait(NamedTuple):
    """Where minifsdp waits, or tells the allocator of a use."""

    file: str
    function: str
    text: str
    first: int
    last: int


def waits(stem: str) -> list[Wait]:
    path = Path(minifsdp.__file__).parent / f"{stem}.py"
    found = {}
    for function in ast.walk(ast.parse(path.read_text())):  # outer ones before those inside
        for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if getattr(getattr(call, "func", None), "attr", "") in METHODS:
                lines = call.lineno, call.end_lineno
                found[lines] = Wait(path.name, function.name, ast.unparse(call), *lines)
    return list(found.values())


WAITS = [w for stem in ("unshard", "reshard", "reduce", "offload", "engine") for w in waits(stem)]


def races(forgotten: Wait | None, strategy: ShardingStrategy, **settings) -> list[str]:
    """Those of two steps, of an evaluation, and of a forward and a backward that fail."""
    place = forgotten and (forgotten.file, forgotten.first, forgotten.last)
    if "HYBRID" in strategy.name:
        settings["device_mesh"] = grid(strategy)
    with noting_device(place) as notes:
        model = stack(3, sharding_strategy=strategy, forward_prefetch=True, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for at in range(2):
            step(model, at)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch())
        fail(model, model.module[2].register_full_backward_hook)
        fail(model, model.module[1].register_forward_hook)
        if settings["cpu_offload"] is None:  # else this is the host's, which waits for gradients
            with torch.no_grad():
                model.engine.units[2].shard.mul_(0.9)  # prefetched, and not used
        step(model)
        optimizer.step()
    return sorted(set(notes.races))


def fail(model, register_hook) -> None:
    def interrupt(*_):
        raise InterruptedError

    handle = register_hook(interrupt)
    with pytest.raises(InterruptedError):
        step(model)
    handle.remove()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ShardingStrategy)
@on_ranks(4)
def test_no_wait_is_missing(strategy, offload, precision):
    if device().type == "cuda":
        pytest.skip("the streams are stand-ins")
    settings = dict(cpu_offload=OFFLOADS[offload], mixed_precision=PRECISIONS[precision])
    assert races(None, strategy, **settings) == []


@pytest.mark.parametrize("wait", WAITS, ids=lambda w: f"{w.file} {w.function}: {w.text}")
@on_ranks(2)
def test_no_wait_could_be_left_out(wait):
    if device().type == "cuda":
        pytest.skip("the streams are stand-ins")
    assert any(
        races(wait, strategy, cpu_offload=offload)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        for offload in OFFLOADS.values()
    )

"""sim/races.py: no wait of the engine is missing, and none could be left out."""

import ast
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

import minifsdp
from minifsdp import BackwardPrefetch, CPUOffload, ForwardPrefetch, MixedPrecision, ShardingStrategy
from minifsdp.sim import cluster
from minifsdp.sim.streams import VirtualEvent, VirtualStream
from tests.small import batch, stack, step

OFFLOADS = {"": None, "offload": CPUOffload(True)}
BF16 = MixedPrecision(torch.bfloat16, torch.float32)
METHODS = {
    "wait": VirtualEvent,
    "synchronize": VirtualEvent,
    "wait_event": VirtualStream,
    "record_use": VirtualStream,
}


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


@contextmanager
def without(wait: Wait | None):
    """Inside, this one does nothing."""

    def forgetful(method):
        def maybe(*args):
            caller = sys._getframe(1)
            file, line = Path(caller.f_code.co_filename).name, caller.f_lineno
            if file != wait.file or not wait.first <= line <= wait.last:
                method(*args)

        return maybe

    with ExitStack() as stack:
        for name, kind in METHODS.items() if wait else ():
            stack.enter_context(patch.object(kind, name, forgetful(getattr(kind, name))))
        yield


def races(forgotten: Wait | None, strategy: ShardingStrategy, **settings):
    """Those of two steps, of an evaluation, and of a forward and a backward that fail."""
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu, without(forgotten):
        model = stack(3, sharding_strategy=strategy, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for at in range(2):
            step(model, at)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch())
        fail(model, model.module[2].register_full_backward_hook)
        fail(model, model.module[1].register_forward_hook)
        if settings.get("cpu_offload") is None:  # else the host steps, which waits for gradients
            with torch.no_grad():
                model.engine.units[2].shard.mul_(0.9)  # prefetched, and not used
        step(model)
        optimizer.step()
    return gpu.races()


def fail(model, register_hook) -> None:
    def interrupt(*_):
        raise InterruptedError

    handle = register_hook(interrupt)
    with pytest.raises(InterruptedError):
        step(model)
    handle.remove()


@pytest.mark.parametrize("limit", [True, False, 1])
@pytest.mark.parametrize("forward", [False, *ForwardPrefetch])
@pytest.mark.parametrize("backward", [None, *BackwardPrefetch])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_no_wait_is_missing(strategy, offload, backward, forward, limit):
    assert not races(
        None,
        strategy,
        cpu_offload=OFFLOADS[offload],
        backward_prefetch=backward,
        forward_prefetch=forward,
        limit_all_gathers=limit,
    )


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_nor_with_mixed_precision(strategy, offload):
    settings = dict(cpu_offload=OFFLOADS[offload], mixed_precision=BF16)
    assert not races(None, strategy, forward_prefetch=True, **settings)


@pytest.mark.parametrize("wait", WAITS, ids=lambda w: f"{w.file} {w.function}: {w.text}")
def test_no_wait_could_be_left_out(wait):
    assert any(
        races(wait, strategy, cpu_offload=offload, forward_prefetch=True)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        for offload in OFFLOADS.values()
    )

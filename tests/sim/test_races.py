"""sim/races.py: no wait of the engine is missing, and each that is left out is told by name."""

import ast
import re
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

import minifsdp
from minifsdp import BackwardPrefetch, CPUOffload, ForwardPrefetch, MixedPrecision, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.sim import cluster
from minifsdp.sim.memory.allocator import MiB
from minifsdp.sim.races import Race
from minifsdp.sim.streams import VirtualEvent, VirtualStream, make_streams
from minifsdp.sim.tape import Buffer, Op
from tests.small import batch, stack, step

OFFLOADS = {"": None, "offload": CPUOffload(True)}
BF16 = MixedPrecision(torch.bfloat16, torch.float32)
METHODS = {
    "wait": VirtualEvent,
    "synchronize": VirtualEvent,
    "wait_event": VirtualStream,
    "record_stream": VirtualStream,
}


class Wait(NamedTuple):
    """Where minifsdp waits, or tells the allocator of a use."""

    file: str
    function: str
    text: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}"


def waits(stem: str) -> list[Wait]:
    path = Path(minifsdp.__file__).parent / f"{stem}.py"
    found = {}
    for function in ast.walk(ast.parse(path.read_text())):  # outer ones before those inside
        for call in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
            if getattr(getattr(call, "func", None), "attr", "") in METHODS:
                lines = call.lineno, call.end_lineno
                found[lines] = Wait(path.name, function.name, ast.unparse(call), *lines)
    return list(found.values())


CONCEPTS = (
    *(f"core/{name}" for name in ("unshard", "reshard", "reduce", "engine", "gradients")),
    "offload",
)
WAITS = [wait for stem in CONCEPTS for wait in waits(stem)]


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
    """Those of two steps, of evaluations, and of a forward and a backward that fail."""
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
        with torch.no_grad():
            model.module[1](batch())  # the next unit is prefetched, and not used
            if settings.get("cpu_offload") is None:  # else the host writes, and waits for gradients
                model.engine.units[2].sharded_flat_param.mul_(0.9)
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


@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_nor_in_rows(strategy, offload, precision):
    settings = dict(cpu_offload=OFFLOADS[offload], mixed_precision=precision)
    settings |= dict(use_orig_params=True, forward_prefetch=True)
    assert not races(None, strategy, **settings)
    wait = next(wait for wait in WAITS if "unshard_event.wait" in wait.text)
    if strategy is ShardingStrategy.FULL_SHARD and not offload:
        assert races(wait, strategy, **settings)  # so it is not blind


MISSED = {
    "unshard.py wait_for_unshard: unit.unshard_event.wait()":
        r"addmm on compute uses memory of all-gather <root> .* and does not wait for "
        r"_allgather_base_ of all-gather <root> on unshard",
    "reshard.py reshard: streams.compute.record_stream(unit.unsharded.data)":
        r"memory of all-gather '1' .* is given out again while addmm on compute may still use it",
    "reshard.py reshard: unit.unshard_event.wait()":  # the optimizer steps while it is sent
        r"mul_ on compute uses .* from the compute stream\) and does not wait for "
        r"_allgather_base_ of all-gather '2' on unshard",
    "reduce.py start: stream.wait_event(self.event)":
        r"mul_ of reduce '3' on reduce uses the result of cat .* and does not wait for "
        r"cat on compute",
    "reduce.py advance: self.event.wait()":
        r"the result of cat .* is given out again while mul_ of reduce '3' on reduce may still "
        r"use it",
    "reduce.py wait_for_result: self.event.synchronize()":
        r"\w+ on host uses .* and does not wait for copy_ of download <root> on download",
    "reduce.py wait_for_result: self.event.wait()":
        r"\w+ on compute uses memory of reduce <root> .* and does not wait for allreduce_ of "
        r"all-reduce <root> on replicate",
    "offload.py prepare: streams.unshard.wait_event("
    "streams.upload.submit(launch, f'upload {unit.label}'))":
        r"_allgather_base_ of all-gather <root> on unshard uses memory of upload <root> .* and "
        r"does not wait for copy_ of upload <root> on upload",
    "offload.py tensor: streams.unshard.record_stream(copy)":
        r"memory of upload <root> .* is given out again while _allgather_base_ of all-gather "
        r"<root> on unshard may still use it",
    "offload.py launch: self._streams.download.record_stream(value)":
        r"memory of reduce '3' .* is given out again while copy_ of download '3' on download may "
        r"still use it",
    "engine.py start: self.streams.unshard.wait_event(self.written())":
        r"_allgather_base_ of all-gather <root> on unshard uses .* from the compute stream\) and "
        r"does not wait for copy_ on compute",
    "gradients.py drop: reduction.event.wait()":
        r"the result of cat .* is given out again while mul_ of reduce '2' on reduce may still "
        r"use it",
}  # fmt: skip
"""What is told first where a wait is left out, for all of them."""


@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_each_wait_that_is_left_out_is_told_by_name(wait):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD):
        for offload in OFFLOADS.values():
            found = races(wait, strategy, cpu_offload=offload, forward_prefetch=True)
            if found:
                assert re.fullmatch(MISSED[str(wait)], str(found[0]))
                return
    pytest.fail("nobody noticed")


def test_there_are_no_other_waits():
    assert set(map(str, WAITS)) == set(MISSED)


def use_again(before=lambda gpu, x: None, between=lambda gpu: None, by="unshard"):
    """The races of a program that uses memory of the compute stream's pool on the compute stream,
    frees it, gets memory of that pool once more, and writes to it first on another stream."""
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        before(gpu, x)
        del x
        y = torch.empty(4 * MiB)
        between(gpu)
        with gpu.on(by):
            y.zero_()
        # What comes now does not make it better.
        streams = gpu_streams(gpu)
        streams.unshard.wait_event(streams.compute.record_event())
    return list(map(str, gpu.races()))


def gpu_streams(gpu):
    return make_streams(gpu, torch.device("meta"))


def test_who_uses_memory_of_another_streams_pool_first_waits_for_what_that_did_with_it():
    (race,) = use_again()
    assert race == (
        "zero_ on unshard uses the result of empty (16,777,216 bytes from the compute stream) and "
        "does not wait for ones on compute, which may still use what was there before"
    )
    assert not use_again(by="compute")  # which does one thing after the other

    def waits(gpu):
        streams = gpu_streams(gpu)
        streams.unshard.wait_event(streams.compute.record_event())

    assert not use_again(between=waits)
    assert not use_again(between=lambda gpu: gpu_streams(gpu).compute.record_event().synchronize())
    assert not use_again(between=lambda gpu: gpu.synchronize())


def test_it_need_not_wait_for_what_the_allocator_has_waited_for():
    def reads(gpu, x):
        streams = gpu_streams(gpu)
        streams.reduce.wait_event(streams.compute.record_event())
        with gpu.on("reduce"):
            x.sum()

    def is_recorded(gpu, x):
        reads(gpu, x)
        gpu.record_stream(x, "reduce")

    assert not use_again(is_recorded)
    assert len(use_again(lambda gpu, x: gpu.record_stream(x, "reduce"))) == 1  # it had not waited
    # The allocator does not wait for the stream that the memory belongs to.
    assert len(use_again(lambda gpu, x: gpu.record_stream(x, "compute"))) == 1
    # What is given out too early is told once.
    (race,) = use_again(reads, by="compute")
    assert "is given out again while sum on reduce may still use it" in race


def test_memory_that_was_never_used_before_need_not_be_waited_for():
    with cluster() as gpu:
        x, y = torch.ones(4 * MiB), torch.empty(4 * MiB)
        with gpu.on("unshard"):
            y.zero_()
        del x
    assert not gpu.races()


def test_what_was_used_long_ago_has_to_be_waited_for_as_well():
    """Any block of the pool may be the one that is given out."""
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        del x
        both = torch.empty(4 * MiB), torch.empty(MiB)
        with gpu.on("unshard"):
            both[1].zero_()
    (race,) = gpu.races()
    assert "zero_ on unshard" in str(race) and "ones on compute, which may" in str(race)


def test_memory_that_was_freed_is_not_used():
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        x.untyped_storage().resize_(0)
        x.view(2, -1), x[:0].sum()  # no memory is read
        assert not gpu.races()
        x.sum()
        x.untyped_storage().resize_(16 * MiB)
        x.zero_()
    (race,) = gpu.races()
    assert str(race) == (
        "sum on compute uses the result of ones (16,777,216 bytes from the compute stream) that "
        "has been freed"
    )


def test_a_layer_does_not_compute_with_a_unit_that_was_resharded():
    with cluster(nodes=2, gpus_per_node=2) as gpu:
        model = FSDP(nn.Sequential(nn.LayerNorm(6)))

        def free(*_):
            model.engine.units[0].unsharded.storage.resize_(0)

        model.module[0].register_forward_pre_hook(free)
        model(torch.zeros(3, 6))
    (race,) = gpu.races()
    assert str(race) == (
        "native_layer_norm on compute uses memory of all-gather <root> (48 bytes from the unshard "
        "stream) that has been freed"
    )


def test_after_a_synchronization_memory_may_be_given_out_again():
    def use(synchronizes):
        with cluster() as gpu:
            with gpu.on("unshard"):
                x = torch.empty(4 * MiB)
            x.zero_()
            del x
            if synchronizes:
                gpu.synchronize()
            with gpu.on("unshard"):
                torch.zeros(4 * MiB)
        return gpu.races()

    assert not use(synchronizes=True)
    (race,) = use(synchronizes=False)
    assert "is given out again while zero_ on compute may still use it" in str(race)


@pytest.mark.parametrize(
    "label, words",
    [
        ("all-gather 'a'", "memory of all-gather 'a' (8 bytes"),
        ("empty", "the result of empty (8 bytes"),
        ("", "the result of somebody (8 bytes"),
    ],
)
def test_memory_is_told_by_who_made_it(label, words):
    op = Op("add_", "", "compute", 0.0, 0.0, 1.0, [], [])
    assert words in str(Race(op, None, Buffer(label, "unshard", 8)))

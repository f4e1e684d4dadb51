"""gradients.py: all of a backward's gradients reach the optimizer, or none, one at a time."""

import gc
import weakref
from contextlib import ExitStack, nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import minifsdp.comm.collectives
import minifsdp.core.reduce
from minifsdp import CPUOffload, MixedPrecision, ModuleWrapPolicy, ShardingStrategy
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.core.gradients import Gradients
from minifsdp.core.streams import CpuEvent, CpuStream, Streams
from minifsdp.core.unit_state import Purpose
from minifsdp.sim import cluster
from minifsdp.strategies import stages_of
from tests.lone_unit import lone_unit
from tests.parity import grid
from tests.ranks import device, on_ranks
from tests.small import (
    Block,
    assert_same_gradients,
    batch,
    gathered_gradients,
    mean_gradients,
    reductions,
    replaced,
    stack,
    step,
    watch,
)
from tests.support.test_unsharded_storage import TwoEnds


@on_ranks(2)
def test_gradients_are_handed_over_all_or_none():
    model = stack()
    engine = model.engine
    engine.start(Purpose.TRAIN)
    with reductions() as started:
        for unit in engine.units[:3]:
            engine.gradients.take(unit, torch.ones(42, device=device()))
    started[1].event = CpuEvent(Mock(side_effect=ConnectionError("gone")))
    with pytest.raises(ConnectionError):
        engine.gradients.finish()
    assert all(unit.sharded_flat_param.grad is None for unit in engine.units)


@on_ranks(2)
def test_at_most_one_reduction_is_under_way():
    model, open_at_once = stack(), []
    with reductions() as started:

        def counted(*args):
            open_at_once.append(sum(not r.event.query() for r in started))
            return noted(*args)

        noted = minifsdp.core.reduce.Reduction
        with replaced(noted, counted):
            step(model)
    assert open_at_once == [0] * 5
    assert all(reduction.event.query() for reduction in started)


class Recorded(CpuEvent):
    """An event that notes who waits for it."""

    def __init__(self, label, log, finish=None):
        super().__init__(finish)
        self.label, self.log = label, log

    def wait(self):
        self.log.append(f"compute < {self.label}")
        super().synchronize()

    def synchronize(self):
        self.log.append(f"host < {self.label}")
        super().synchronize()


class Recording(CpuStream):
    """A stream that notes what is started on it, and what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def submit(self, launch, label=""):
        self.log.append(f"{label} on {self.name}")
        return Recorded(label, self.log, launch())

    def record_event(self):
        return Recorded("grad", self.log)

    def wait_event(self, event):
        self.log.append(f"{self.name} < {event.label}")
        CpuEvent.synchronize(event)


STREAMS = ("compute", "unshard", "reduce", "replicate", "upload", "download")
FIRST = ["reduce < grad", "reduce {} on reduce"]
NEXT = {  # what is started after what
    "half": ["replicate < reduce {}", "all-reduce {} on replicate"],
    "other half": ["replicate < all-reduce {}", "all-reduce {} on replicate"],
    "copy": ["download < reduce {}", "download {} on download"],
    "copy of a mean": ["download < all-reduce {}", "download {} on download"],
}
KINDS = {
    "sharded": ({}, [], "compute < reduce {}"),
    "mixed precision": ({"precision": MixedPrecision(torch.bfloat16, torch.float32)}, [],
                        "compute < reduce {}"),
    "whole": ({"ranks": 1, "replicas": 2}, ["half"], "compute < all-reduce {}"),
    "hybrid": ({"replicas": 2}, ["half", "other half"], "compute < all-reduce {}"),
    "offload": ({"offload": True}, ["copy"], "host < download {}"),
    "hybrid, offload": ({"replicas": 2, "offload": True},
                        ["half", "other half", "copy of a mean"], "host < download {}"),
}  # fmt: skip


@pytest.mark.direct
@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_that_is_complete_takes_all_reductions_one_stage_further(kind):
    """What is started when, and who waits for what. The computation waits for the first stage
    alone, which reads the gradient, before the next one starts; and for the last, at the end."""
    settings, stages, end = KINDS[kind]
    with ExitStack() as stack:
        log: list[str] = []
        streams = Streams(torch.device("cpu"), *(Recording(name, log) for name in STREAMS))
        gradients, labels, steps = Gradients(streams), [], []
        for name in "abcde":
            unit = stack.enter_context(lone_unit(**settings)).unit
            unit.rename(name)
            unit.stages = stages_of(unit, streams)
            labels.append(unit.label)
            gradients.take(unit, torch.zeros(unit.layout.padded_numel, dtype=unit.unsharded.dtype))
            steps.append([*log])
            log.clear()
        gradients.finish()

    def advanced(at: int) -> list[str]:
        """What happens when the gradient of this number is complete, the newest reduction first."""
        found = []
        for number, label in reversed([*enumerate(labels[:at])]):
            age = at - number  # its stages that were started, up to now
            lines = ["compute < reduce {}"] * (age == 1)
            lines += NEXT[stages[age - 1]] if age <= len(stages) else []
            found += [line.format(label) for line in lines]
        return found

    for at, label in enumerate(labels):
        assert steps[at] == [*advanced(at), *(line.format(label) for line in FIRST)], label
    rest = [line for at in range(5, 5 + len(stages) + 1) for line in advanced(at)]
    assert log == [*rest, *(end.format(label) for label in labels)]


@on_ranks(2)
def test_after_a_step_nothing_of_its_reductions_is_kept():
    model = stack()
    with reductions() as started:
        step(model)
    alive = [weakref.ref(reduction) for reduction in started]
    started.clear()
    gc.collect()
    assert alive and not any(reduction() for reduction in alive)


def interrupt(*_):
    raise InterruptedError


@pytest.mark.parametrize("offload", [None, CPUOffload(True)], ids=["", "offload"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_what_is_still_being_sent_is_not_given_away_after_an_exception(strategy, offload):
    with cluster(nodes=2, gpus_per_node=2, kind="cpu") as gpu:
        model = stack(sharding_strategy=ShardingStrategy[strategy], cpu_offload=offload)
        handle = model.module[2].register_full_backward_hook(interrupt)
        with pytest.raises(InterruptedError):
            step(model)
        handle.remove()
        step(model)
    assert not gpu.races()


@on_ranks(2)
def test_the_last_gradient_gets_its_second_half_too():
    model = stack(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=grid(ShardingStrategy.HYBRID_SHARD),
    )
    model.engine.start(Purpose.TRAIN)
    for number, unit in enumerate(model.engine.units[:2]):
        grad = torch.full((42,), float(number + dist.get_rank()), device=device())
        model.engine.gradients.take(unit, grad)
    model.engine.gradients.finish()
    assert [float(unit.sharded_flat_param.grad[0]) for unit in model.engine.units[:2]] == [0.5, 1.5]


@pytest.mark.parametrize("synchronizes", [True, False])
@on_ranks(2)
def test_what_a_backward_that_failed_has_left_is_dropped(synchronizes):
    """Gradients that it kept, and how far its units and ranks were: the ranks had gone apart."""
    torch.manual_seed(0)
    plain = TwoEnds().to(device())
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(TwoEnds().to(device()), auto_wrap_policy=policy, forward_prefetch=False)
    with watch(model) as before:
        model(batch())
    x = batch().requires_grad_()
    x.register_hook(interrupt)
    with (
        pytest.raises(InterruptedError),
        nullcontext() if synchronizes else model.no_sync(),
    ):
        model(x)[dist.get_rank()].backward()
    with watch(model) as after:
        losses = model(batch())
    assert after[after.index("+root") :] == before  # first, what was left is freed
    assert model.engine.stats.unsharded_units == 1  # the root stays, and nobody else
    with nullcontext() if synchronizes else model.no_sync():
        sum(losses).backward()
    sum(model(batch(step=1))).backward()
    expected = [sum(plain(batch(step=at))) for at in range(2)]
    assert_same_gradients(gathered_gradients(model), mean_gradients(plain, *expected))


@on_ranks(2)
def test_ranks_without_a_gradient_send_zeros_in_the_dtype_of_the_others():
    torch.manual_seed(0)
    plain = TwoEnds().to(device(), torch.bfloat16)
    torch.manual_seed(0)
    low = MixedPrecision(torch.bfloat16)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(TwoEnds().to(device()), auto_wrap_policy=policy, mixed_precision=low)
    model(batch())[dist.get_rank()].backward()
    losses = plain(batch().to(torch.bfloat16))
    losses[1 - dist.get_rank()] *= 0
    expected = mean_gradients(plain, *losses)
    for name, grad in gathered_gradients(model).items():
        assert torch.equal(grad, expected[name].float()), name

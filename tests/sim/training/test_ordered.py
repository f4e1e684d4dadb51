"""sim/training/ordered.py: PyTorch's time, in the memory of two units."""

from dataclasses import replace
from itertools import pairwise

import pytest
from torch import nn

from minifsdp.core.streams import CpuEvent
from minifsdp.sim.tape import COMPUTE, Op, Wait
from minifsdp.sim.training.history import APPROACHES
from minifsdp.sim.training.ordered import ORDERED, TwoInnermost
from tests.core.common import StubUnit
from tests.ranks import on_ranks
from tests.sim.training.test_history import (
    Block,
    Crooked,
    last_step,
    learned,
    mistargets,
    straight,
    train,
)


def measured(approach, module):
    """Seconds and bytes of the last step, and what of it the host was kept waiting for."""
    gpu, reports = train(approach, module)
    seconds = reports[-1]["step"] + gpu.report()["step"]
    waits = sum(isinstance(e, Wait) and e.by_limiter for e in last_step(gpu))
    return seconds, gpu.report()["peak reserved"], waits


def test_units_in_units_train_faster_than_with_pytorchs_queue_in_the_memory_of_two():
    pytorch, two, ordered = (
        measured(each, Crooked) for each in (APPROACHES["PyTorch"], APPROACHES["minifsdp"], ORDERED)
    )
    assert ordered[0] < 0.98 * pytorch[0] < 0.93 * two[0]
    assert ordered[1] == two[1] < 0.96 * pytorch[1]
    assert two[2] > 0 == ordered[2]


@pytest.mark.parametrize("module", [Crooked, straight])
def test_no_memory_is_overwritten_that_is_in_use_and_no_gather_is_in_vain(module):
    gpu, _ = train(ORDERED, module)
    assert not gpu.races() and not mistargets(gpu)


def test_two_units_are_there_whose_memory_is_used_in_turn():
    gpu, reports = train(ORDERED, straight)
    _, two, _ = measured(APPROACHES["minifsdp"], straight)
    assert reports[-1]["peak unsharded units"] == gpu.report()["peak unsharded units"] == 2
    assert gpu.report()["peak reserved"] == two


def idle_for_the_host(approach):
    """How long the compute stream had nothing to do because the host was late, each time, in us."""
    ops = [e for e in last_step(train(approach, straight)[0]) if isinstance(e, Op)]
    compute = [op for op in ops if op.stream == COMPUTE]
    return [round((b.launched - a.end) * 1e6) for a, b in pairwise(compute) if b.launched > a.end]


def test_a_limit_of_two_has_the_compute_stream_wait_for_the_host_at_each_unit_of_the_backward():
    assert idle_for_the_host(APPROACHES["minifsdp"]) == [36, 58, 58, 58, 58, 58, 58]
    assert idle_for_the_host(APPROACHES["PyTorch"]) == idle_for_the_host(ORDERED) == []


def test_where_nothing_computes_between_forward_and_backward_a_gather_is_seen():
    """It waits for the last forward, which has the same unit. A loss would hide it."""
    with_queue, ordered = (measured(each, straight)[0] for each in (APPROACHES["PyTorch"], ORDERED))
    assert 1.01 < ordered / with_queue < 1.02


def test_a_limit_that_counts_in_the_same_way_is_slower_if_the_host_waits_for_it():
    waiting = replace(ORDERED, limiter=APPROACHES["minifsdp"].limiter)
    assert measured(waiting, Crooked)[0] > 1.04 * measured(ORDERED, Crooked)[0]


class Keeping(nn.Module):
    """Uses a view of its first unit's parameters after that unit was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.kept = nn.ModuleList(Block() for _ in range(4)), None
        self.blocks[0].register_forward_hook(self.keep)

    def keep(self, block, args, output) -> None:
        self.kept = block[1].weight.detach()

    def forward(self, x):
        x = self.blocks[0](x)
        x, self.kept = x + self.kept.sum(), None
        for block in self.blocks[1:]:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:a parameter of unit")  # which says what to do instead
def test_why_it_is_not_the_default():
    """What frees a view that was kept is nobody whom the unshard stream waits for."""
    assert not train(APPROACHES["minifsdp"], Keeping)[0].races()
    (race,) = train(ORDERED, Keeping)[0].races()
    assert "is given out again while sum on compute may still use it" in str(race)


class TestTwoInnermost:
    def test_a_third_is_declined_and_one_around_others_is_not_counted(self):
        limiter, around = TwoInnermost(), StubUnit("around", [], True)
        a, b, c = (StubUnit(name, [around], True) for name in "abc")
        assert limiter.admit(a, needed=False)  # from here on it is known what is around it
        assert limiter.admit(around, needed=False) and limiter.admit(b, needed=False)
        assert not limiter.admit(c, needed=False), "the third"
        assert limiter.admit(c, needed=True)
        limiter.freed(c, CpuEvent())
        limiter.freed(a, CpuEvent())
        assert limiter.admit(c, needed=False)

    def test_one_around_others_is_admitted_beside_two(self):
        limiter, around = TwoInnermost(), StubUnit("around", [], True)
        a, b = (StubUnit(name, [around], True) for name in "ab")
        assert limiter.admit(a, needed=True) and limiter.admit(b, needed=True)
        assert limiter.admit(around, needed=False)


@on_ranks(2)
def test_it_does_not_change_what_is_learned():
    assert learned(ORDERED) == learned(None)

"""sim/calibration/timing.py: how often something is called, and what is counted."""

import pytest
import torch.distributed as dist

from minifsdp.sim.calibration import timing
from tests.ranks import device, on_ranks

SLOW_START = (9.0, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0, 8.0, 1.0)


class Clock:
    """A clock that work moves forward: by ``times``, and then by the last of them."""

    def __init__(self, *times: float) -> None:
        self.now, self.calls, self._times = 0.0, 0, times

    def work(self) -> None:
        self.calls += 1
        self.now += self._times[min(self.calls, len(self._times)) - 1]


def counted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> float:
    assert dist.group.WORLD is not None
    monkeypatch.setattr(timing, "time", clock)
    clock.perf_counter = lambda: clock.now
    return timing.seconds(clock.work, device(), dist.group.WORLD)


@on_ranks(1)
def test_the_first_call_does_not_count_and_neither_do_a_few_slow_ones():
    clock = Clock(*SLOW_START)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert counted(clock, monkeypatch) == 1.0
    assert clock.calls == 2 + timing.BATCHES


@on_ranks(1)
def test_what_is_short_is_repeated():
    clock = Clock(1e-4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert abs(counted(clock, monkeypatch) / 1e-4 - 1) < 1e-6
    assert clock.calls >= timing.BATCHES * timing.LONG_ENOUGH / 1e-4 * 0.98


@on_ranks(2)
def test_each_time_the_slowest_rank_counts():
    """Each rank is late in one batch of three. The others wait for it, so that two of three batches
    are slow, though each rank for itself has two fast ones of three."""
    late = dist.get_rank()
    times = [1.0, 1.0, *[5.0 if at % 3 == late else 2.0 for at in range(timing.BATCHES)]]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert counted(Clock(*times), monkeypatch) == 5.0


@on_ranks(2)
def test_all_ranks_begin_a_batch_together():
    """Else a rank would be timed while another rests, and have the machine to itself."""
    log = []

    def add_up(number, group, largest=False) -> None:
        log.append("together")

    def batch(work, count, here) -> float:
        log.append("batch")
        return 1.0

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(timing, "add_up", add_up)
        monkeypatch.setattr(timing, "_batch", batch)
        assert dist.group.WORLD is not None
        timing.seconds(lambda: None, device(), dist.group.WORLD)
    first_guess = ["batch", "together"]
    assert log == [*first_guess, *["together", "batch"] * timing.BATCHES, "together"]


@on_ranks(2)
def test_all_ranks_of_a_group_call_it_as_often():
    times = (1.0, 1e-4) if dist.get_rank() == 0 else (1.0, 1e-3)  # alone: 100 times, and 10
    clock = Clock(*times)
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted(clock, monkeypatch)
    assert clock.calls >= timing.BATCHES * timing.LONG_ENOUGH / 1e-4 * 0.98

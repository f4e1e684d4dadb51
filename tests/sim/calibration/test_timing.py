"""sim/calibration/timing.py: how often something is called, and what is counted."""

import torch

from minifsdp.sim.calibration import timing
from tests.ranks import device, on_ranks

CPU = torch.device("cpu")


class Clock:
    """A clock that work moves forward."""

    def __init__(self, *times: float) -> None:
        self.now, self.calls, self._times = 0.0, 0, list(times)

    def work(self) -> None:
        self.calls += 1
        self.now += self._times[min(self.calls, len(self._times)) - 1]


def patched(monkeypatch, clock: Clock) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)


def test_the_first_call_does_not_count_and_neither_do_a_few_slow_ones(monkeypatch):
    clock = Clock(9.0, 1.0, 1.0, 1.0, 7.0, 1.0, 1.0, 8.0, 1.0)
    patched(monkeypatch, clock)
    assert timing.seconds(clock.work, CPU) == 1.0
    assert clock.calls == 2 + timing.BATCHES


def test_what_is_short_is_repeated(monkeypatch):
    clock = Clock(1e-4)
    patched(monkeypatch, clock)
    assert abs(timing.seconds(clock.work, CPU) / 1e-4 - 1) < 1e-6
    assert clock.calls >= timing.BATCHES * timing.LONG_ENOUGH / 1e-4 * 0.98


@on_ranks(2)
def test_all_ranks_of_a_group_call_it_as_often():
    calls = []

    def work() -> None:
        calls.append(1)
        if torch.distributed.get_rank() == 0:
            torch.ones(2_000_000).sum()  # slower, so that this rank alone would do fewer

    timing.seconds(work, device(), torch.distributed.group.WORLD)
    counts = [torch.zeros((), device=device()) for _ in range(2)]
    torch.distributed.all_gather(counts, torch.tensor(float(len(calls)), device=device()))
    assert counts[0] == counts[1]

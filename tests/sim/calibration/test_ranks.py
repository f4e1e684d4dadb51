"""sim/calibration/ranks.py: processes that measure."""

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from minifsdp.sim.calibration import ranks
from minifsdp.sim.calibration.machine import Device, Samples


def counted(here: torch.device, device: Device) -> Samples:
    """Instead of a measurement: who is there."""
    rank, threads = dist.get_rank(), torch.get_num_threads()
    found: list = [[] for _ in fields(Samples)]
    assert dist.get_world_size() == device.ranks and here.type == "cpu"
    return Samples(*found[:-4], launch=[rank], host=[threads], copies=[1.0], taken=[])


def _rank_counts(rank: int, device: Device, folder: str) -> None:
    ranks.measured = counted
    ranks._rank(rank, device, folder)


def _rank_fails(rank: int, device: Device, folder: str) -> None:
    raise KeyError("on purpose")


@pytest.mark.slow
def test_what_all_ranks_have_measured_is_put_together(monkeypatch):
    monkeypatch.setattr(ranks, "_rank", _rank_counts)
    # In a new process `_rank_counts` finds the real `_rank`.
    found = ranks.samples(Device("cpu", 2**30, 2))
    assert found.launch == [0, 1] and found.copies == [1.0, 1.0] and not found.products
    assert found.host[0] == found.host[1] >= 1


def test_a_rank_that_fails_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(ranks, "_rank", _rank_fails)
    with pytest.raises(RuntimeError, match="a rank has failed: KeyError: 'on purpose'") as error:
        ranks.samples(Device("cpu", 2**30, 2))
    assert "\n" not in str(error.value)


def test_this_machine_is_shared_by_its_ranks():
    two, four = ranks.this_machine(2), ranks.this_machine(4)
    assert (two.ranks, four.ranks) == (2, 4)
    if two.cpu:
        assert two.memory == pytest.approx(2 * four.memory) and two.memory > 2**28

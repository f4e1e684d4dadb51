"""sim/calibration/collectives.py: samples of collectives."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp import comm
from minifsdp.sim.calibration import collectives
from tests.ranks import device, on_ranks


@pytest.mark.parametrize("native", [False, True], ids=["direct messages", "torch's own"])
@on_ranks(2)
def test_each_collective_is_sampled_by_steps_and_bytes_that_a_rank_sends(native):
    sizes = [2**10, 2**12]
    with (
        patch.object(comm.collectives, "NATIVE", native),
        patch.object(collectives, "_sizes", lambda here: sizes),
    ):
        samples = collectives.alone(device(), dist.group.WORLD)
    halves = [size * 4 / 2 for size in sizes]
    expected = [(n, n * half) for half in halves for n in (1, 1, 2)]
    assert [sample[:2] for sample in samples] == expected
    assert all(sample.seconds > 0 for sample in samples)


@on_ranks(2)
@pytest.mark.parametrize("both, lost", [(5.0, 1.0), (3.5, 0.25), (2.0, 0.0)])
def test_what_products_lose_is_counted_in_gathers(both, lost):
    """A gather of 2 s beside products of 3 s; they are waited for together."""
    times = iter([0.1, *[2.0, both, 3.0] * 2])
    calls = []

    def seconds(work, here, group) -> float:
        work()
        calls.append(work)
        return next(times)

    with (
        patch.object(collectives, "seconds", seconds),
        patch.object(collectives, "_sizes", lambda here: [2**8, 2**10, 2**12]),
    ):
        found = collectives.beside(device(), torch.float32, dist.group.WORLD)
    assert found == [lost, lost] and len(calls) == 7


@on_ranks(1)
def test_one_rank_has_no_collectives():
    group = dist.group.WORLD
    assert not collectives.alone(device(), group)
    assert not collectives.beside(device(), torch.float32, group)

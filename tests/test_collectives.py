"""collectives.py: torch's own collectives, as a unit uses them."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import minifsdp.core.collectives
from minifsdp.core.collectives import TorchCollectives
from tests.ranks import device, on_ranks, run


def mine(numel, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(device())


def check_all_gather():
    ranks = dist.get_world_size()
    full = torch.full((3 * ranks,), torch.nan, device=device())
    TorchCollectives().all_gather(None, full, mine(3), dist.group.WORLD)()
    assert torch.equal(full, torch.cat([mine(3, rank) for rank in range(ranks)]))


def check_reduce_scatter():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    unit = SimpleNamespace(shard_group=dist.group.WORLD)
    total, finish = TorchCollectives().reduce_scatter(unit, mine(3 * ranks), 1 / ranks)
    finish()
    mean = sum(mine(3 * ranks, other) for other in range(ranks)) / ranks
    torch.testing.assert_close(total, mean[3 * rank : 3 * rank + 3])
    assert total.untyped_storage().nbytes() == total.nbytes  # not a view that keeps `flat` alive


def check_all_reduce():
    ranks, flat = dist.get_world_size(), mine(5)
    TorchCollectives().all_reduce(None, flat, 1 / ranks, dist.group.WORLD)()
    torch.testing.assert_close(flat, sum(mine(5, other) for other in range(ranks)) / ranks)


@pytest.mark.parametrize("check", [check_all_gather, check_reduce_scatter, check_all_reduce])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_gets_what_it_should(check, world_size):
    run(check, world_size)


@on_ranks(2)
def test_what_is_added_up_is_scaled_before():
    """In half precision the sum would overflow where the mean does not."""
    large = torch.full((2,), 60000.0, dtype=torch.float16, device=device())
    unit = SimpleNamespace(shard_group=dist.group.WORLD)
    total, finish = TorchCollectives().reduce_scatter(unit, large.clone(), 0.5)
    finish()
    TorchCollectives().all_reduce(None, large, 0.5, dist.group.WORLD)()
    assert (total == 60000).all() and (large == 60000).all()


@on_ranks(4)
def test_a_gather_is_among_the_ranks_that_it_names_and_a_reduction_among_those_of_the_unit():
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    row = rows[dist.get_rank() // 2]
    mates = [2 * (dist.get_rank() // 2) + at for at in range(2)]
    full, comm = torch.empty(4, device=device()), TorchCollectives()
    comm.all_gather(SimpleNamespace(shard_group=dist.group.WORLD), full, mine(2), row)()
    assert torch.equal(full, torch.cat([mine(2, rank) for rank in mates]))
    total, finish = comm.reduce_scatter(SimpleNamespace(shard_group=row), mine(2), 1.0)
    finish()
    torch.testing.assert_close(total, sum(mine(2, rank) for rank in mates)[[row.rank()]])


@pytest.mark.direct
def test_each_is_started_and_waited_for_when_somebody_asks():
    log = []

    def start(*_, async_op, **__):
        assert async_op, "the rank computes in between"
        log.append("started")
        return SimpleNamespace(wait=lambda: log.append("waited"))

    group = SimpleNamespace(size=lambda: 2)
    unit, comm = SimpleNamespace(shard_group=group), TorchCollectives()
    with (
        patch.object(minifsdp.core.collectives, "torch_all_gather", start),
        patch.object(minifsdp.core.collectives, "torch_reduce_scatter", start),
        patch.object(dist, "all_reduce", start),
    ):
        for begin in (
            lambda: comm.all_gather(unit, torch.zeros(4), torch.zeros(2), group),
            lambda: comm.reduce_scatter(unit, torch.zeros(4), 0.5)[1],
            lambda: comm.all_reduce(unit, torch.zeros(4), 0.5, group),
        ):
            finish = begin()
            assert log == ["started"]
            finish()
            assert log == ["started", "waited"]
            log.clear()

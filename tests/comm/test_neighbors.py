"""neighbors.py: which ranks read each other's memory."""

import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch.distributed as dist

from minifsdp import ShardingStrategy
from minifsdp.comm import neighbors, same_machine
from minifsdp.comm.neighbors import find_neighbors
from tests.comm.near import NEEDED, check_all, near
from tests.parity import mesh
from tests.ranks import on_ranks
from tests.small import stack, step

pytestmark = NEEDED


@on_ranks(3)
def test_ranks_of_one_machine_find_each_other():
    group = near()
    found = same_machine.neighbors[group]
    assert set(found) == set(range(3)) - {dist.get_rank()}
    processes: list = [None] * 3
    dist.all_gather_object(processes, os.getpid())
    assert all(near.process == processes[rank] for rank, near in found.items())
    with patch.object(same_machine, "WANTED", True):
        find_neighbors(group)  # once is enough
    assert same_machine.neighbors[group] is found


@on_ranks(4)
def test_ranks_of_a_model_find_each_other_in_each_of_its_groups():
    model = stack(device_mesh=mesh(replicas=2), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with patch.object(same_machine, "WANTED", True):
        step(model)
    for unit in model.engine.units:
        for group in (unit.shard_group, unit.replicate_group):
            assert set(same_machine.neighbors[group]) == {1 - group.rank()}


@on_ranks(3)
def test_if_one_of_two_ranks_cannot_read_both_send():
    """Rank 1 is in a container, where the number of another process is somebody else's."""
    group, reads = dist.new_group(), neighbors._reads

    def reads_other(process: int, address: int, expected: int) -> bool:
        return reads(process, address, expected + (dist.get_rank() == 1))

    with (
        patch.object(neighbors, "_reads", reads_other),
        patch.object(same_machine, "WANTED", True),
    ):
        find_neighbors(group)
    rank = dist.get_rank()
    assert set(same_machine.neighbors[group]) == (set() if rank == 1 else {0, 2} - {rank})
    check_all(group)


@pytest.mark.parametrize("way", ["new", "of"])
@on_ranks(3)
def test_a_rank_that_has_no_boards_sends_and_so_do_those_that_have(way):
    """Too many files are open on rank 1, or it has no /proc."""
    group, rank = dist.new_group(), dist.get_rank()
    none = patch.object(neighbors.Board, way, side_effect=OSError("too many open files"))
    with none if rank == 1 else nullcontext(), patch.object(same_machine, "WANTED", True):
        find_neighbors(group)
    assert set(same_machine.neighbors[group]) == (set() if rank == 1 else {0, 2} - {rank})
    check_all(group)


@on_ranks(2)
def test_where_memory_cannot_be_read_nobody_is_near():
    with patch.object(neighbors, "POSSIBLE", False):
        assert same_machine.neighbors[near()] == {}


@on_ranks(2)
def test_who_asks_for_gloo_sends():
    group = dist.new_group()
    with patch.object(same_machine, "WANTED", False):
        find_neighbors(group)
    assert group not in same_machine.neighbors

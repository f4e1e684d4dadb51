"""The claim that matters: the losses and parameters of DistributedDataParallel."""

from collections import defaultdict
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized

from minifsdp import ShardingStrategy
from tests.matrix import CELLS, SCHEDULES, Cell, check_all
from tests.models import CASES
from tests.parity import check_parity, delays, reference
from tests.ranks import on_ranks, run


def rows(cells: list[Cell], *fields: str) -> list[tuple]:
    """The cells that have these fields alike run together: one test for each row."""
    found = defaultdict(list)
    for cell in cells:
        found[tuple(str(getattr(cell, field)) for field in fields)].append(cell)
    return [("_".join(key), row) for key, row in found.items()]


@pytest.mark.slow
class TestMatrix(TestCase):
    @parameterized.expand(rows(CELLS, "model", "strategy", "world_size"))
    def test_equal_to_ddp(self, _: str, cells: list[Cell]) -> None:
        run(check_all, cells[0].world_size, cells)

    @parameterized.expand(rows(SCHEDULES[::5], "model", "strategy"))  # `make matrix` has them all
    def test_equal_to_ddp_whenever_gathered(self, _: str, cells: list[Cell]) -> None:
        run(check_all, cells[0].world_size, cells)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_the_defaults_are_bit_equal_to_ddp(name):
    check_parity(name)


@pytest.mark.parametrize("where", ["loss", "reduction", "gather", "free"])
@pytest.mark.parametrize("strategy", [s for s in ShardingStrategy if "HYBRID" not in s.name])
@on_ranks(2)
def test_delays_change_nothing(strategy, where):
    with delays(where):
        for name in ("mlp_nested", "transformer", "experts"):
            check_parity(name, sharding_strategy=strategy, forward_prefetch=True)


@on_ranks(2)
def test_ranks_really_see_different_data():
    losses, _ = reference("mlp_some")
    gathered = [torch.empty_like(losses[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, losses[0])
    assert gathered[0] != gathered[1]


@on_ranks(2)
def test_experts_really_differ():
    _, parameters = reference("experts")
    weight = parameters["1.weight"]
    gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weight)
    assert not torch.equal(*gathered)


def test_every_way_to_set_it_up_is_in_the_matrix():
    assert len(set(CELLS)) == len(CELLS) and len(CELLS) + len(SCHEDULES) >= 1500
    for cells in (CELLS, SCHEDULES, SCHEDULES[::5]):
        for field in ("backward", "forward", "limit"):
            for strategy in {cell.strategy for cell in cells}:
                values = {getattr(c, field) for c in cells if c.strategy == strategy}
                assert len(values) >= 3, (field, strategy)

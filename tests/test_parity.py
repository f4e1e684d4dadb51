"""The claim that matters: the losses and parameters of DistributedDataParallel."""

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp import ShardingStrategy
from tests.matrix import CELLS, SCHEDULES, STRATEGIES, WORLDS, Cell, check_all
from tests.models import CASES
from tests.parity import check_parity, delays, reference
from tests.ranks import on_ranks, run

SOME_SCHEDULES = SCHEDULES[::5]  # `make matrix` has them all


def pairs_of(cell: Cell) -> set[tuple[Any, ...]]:
    """Any two of its settings."""
    return set(itertools.combinations(zip(Cell._fields, cell, strict=True), 2))


def where_every_two_meet(cells: list[Cell]) -> Iterator[Cell]:
    """Few cells, among which are any two settings together that are together in one of all: always
    the one of a hundred that has most of the pairs that are missing. To try all takes long."""
    missing, choice = set().union(*map(pairs_of, cells)), random.Random(0)
    while missing:
        best = max(choice.sample(cells, 100), key=lambda cell: len(missing & pairs_of(cell)))
        if missing.isdisjoint(pairs_of(best)):
            best = next(cell for cell in cells if not missing.isdisjoint(pairs_of(cell)))
        missing -= pairs_of(best)
        yield best


@functools.cache  # and not at once: each rank imports this file
def some() -> list[Cell]:
    return list(where_every_two_meet(CELLS + SCHEDULES))


@functools.cache
def on_pretended_gpu() -> list[Cell]:
    """`make matrix ARGS=--pretended-gpu` has all, and other numbers of ranks."""
    return list(where_every_two_meet([c for c in CELLS + SCHEDULES if c.world_size == 2]))


@pytest.mark.parametrize("world_size", WORLDS)
def test_equal_to_ddp_in_any_two_settings(world_size):
    run(check_all, world_size, [cell for cell in some() if cell.world_size == world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
def test_equal_to_ddp(model, strategy, world_size):
    """With and without offload, in each precision, initialized in each way."""
    row = model, strategy, world_size
    run(check_all, world_size, [c for c in CELLS if (c.model, c.strategy, c.world_size) == row])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
def test_equal_to_ddp_whenever_gathered(model, strategy):
    """With prefetches and limits."""
    row = model, strategy
    run(check_all, 2, [cell for cell in SOME_SCHEDULES if (cell.model, cell.strategy) == row])


@pytest.mark.parametrize("model", CASES)
def test_equal_to_ddp_on_a_pretended_gpu(model):
    """By what the engine does on a GPU: with torch's collectives, and two kinds of memory."""
    cells = [cell for cell in on_pretended_gpu() if cell.model == model]
    run(check_all, 2, cells, pretended_gpu=True)


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


def test_any_two_settings_meet():
    for few, worlds in ((some(), WORLDS), (on_pretended_gpu(), [2])):
        cells = [cell for cell in CELLS + SCHEDULES if cell.world_size in worlds]
        assert set().union(*map(pairs_of, cells)) == set().union(*map(pairs_of, few))
        assert len(few) < 100


def test_every_way_to_set_it_up_is_in_the_matrix():
    assert len(set(CELLS)) == len(CELLS) and len(CELLS) + len(SCHEDULES) >= 1500
    for cells in (CELLS, SCHEDULES, SOME_SCHEDULES):
        for field in ("backward", "forward", "limit"):
            for strategy in {cell.strategy for cell in cells}:
                values = {getattr(c, field) for c in cells if c.strategy == strategy}
                assert len(values) >= 3, (field, strategy)

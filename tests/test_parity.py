"""The claim that matters: the losses and parameters of DistributedDataParallel."""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifsdp import ShardingStrategy
from tests.matrix import (
    CELLS,
    CORE,
    CORE_STRATEGIES,
    OFFLOAD,
    PRECISION,
    SCHEDULES,
    STRATEGIES,
    WITHOUT_ROWS,
    WORLDS,
    Cell,
    check_all,
)
from tests.models import CASES
from tests.parity import INITS, check_parity, delays, reference
from tests.ranks import on_ranks, run

ROOT = Path(__file__).parents[1]
FEW_RANKS = [cell for cell in CELLS if cell.world_size <= 2]
MANY_RANKS = [cell for cell in CELLS if cell.world_size > 2]


def settings_of(cell: Cell, number: int) -> set[tuple[Any, ...]]:
    """Any so many of its settings."""
    return set(itertools.combinations(zip(Cell._fields, cell, strict=True), number))


def that_meet(cells: Iterable[Cell], number: int) -> set[tuple[Any, ...]]:
    """All of them, of any of these cells."""
    return set(itertools.chain.from_iterable(settings_of(cell, number) for cell in cells))


def where_all_meet(cells: list[Cell], number: int) -> Iterator[Cell]:
    """Few cells, among which are any two (or three: `number`) settings together that are together
    in one of all: always the one of fifty that has most of the sets that are missing. To try all
    takes long."""
    missing, choice = that_meet(cells, number), random.Random(0)
    while missing:
        some = choice.sample(cells, 50)
        best = max(some, key=lambda cell: len(missing & settings_of(cell, number)))
        if missing.isdisjoint(settings_of(best, number)):
            best = next(cell for cell in cells if missing & settings_of(cell, number))
        missing -= settings_of(best, number)
        yield best


@functools.cache  # and not at once: each rank imports this file
def any_two() -> list[Cell]:
    return list(where_all_meet(CELLS + SCHEDULES, 2))


@functools.cache
def any_three() -> list[Cell]:
    """With 3 and 4 ranks; and with 2, whenever units are gathered. `make matrix` has all."""
    return list(where_all_meet(MANY_RANKS + SCHEDULES, 3))


@functools.cache
def on_pretended_gpu() -> list[Cell]:
    """`make matrix ARGS=--pretended-gpu` has all, and other numbers of ranks."""
    return list(where_all_meet([c for c in CELLS + SCHEDULES if c.world_size == 2], 2))


@pytest.mark.parametrize("world_size", WORLDS)
def test_equal_to_ddp_in_any_two_settings(world_size):
    run(check_all, world_size, [cell for cell in any_two() if cell.world_size == world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("model", CASES)
def test_equal_to_ddp_in_any_three_settings(model, world_size):
    """With 3 and 4 ranks; and with 2, all prefetches and limits."""
    row = model, world_size
    run(check_all, world_size, [c for c in any_three() if (c.model, c.world_size) == row])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", CASES)
def test_equal_to_ddp(model, strategy, world_size):
    """With and without offload, in each precision, initialized in each way: in every bit."""
    row = model, strategy, world_size
    run(check_all, world_size, [c for c in FEW_RANKS if (c.model, c.strategy, c.world_size) == row])


@pytest.mark.few(3)
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


def test_with_few_ranks_and_with_many_all_settings_meet_each_other():
    """But the core alone has not all of them."""
    others = {*OFFLOAD, *PRECISION, *INITS, *STRATEGIES} - {"", "fp32", "before", *CORE_STRATEGIES}
    for cells in (FEW_RANKS, MANY_RANKS):
        meet = that_meet(cells, 2)
        values = [{(name, getattr(cell, name)) for cell in cells} for name in Cell._fields]
        for of_one, of_other in itertools.combinations(values, 2):
            for pair in itertools.product(of_one, of_other):
                (_, one), (_, other) = pair
                assert pair in meet or (other == CORE and one in others), pair


def test_few_cells_have_all_settings_that_meet():
    every = CELLS + SCHEDULES
    pretended = [cell for cell in every if cell.world_size == 2]
    for few, cells, number, most in (
        (any_two(), every, 2, 100),
        (on_pretended_gpu(), pretended, 2, 100),
        (any_three(), MANY_RANKS + SCHEDULES, 3, 600),
    ):
        assert that_meet(few, number) == that_meet(cells, number)
        assert set(few) <= set(cells) and len(few) < most


def test_the_page_says_how_many_there_are():
    page = " ".join((ROOT / "tutorials" / "reference" / "testing.md").read_text().split())
    every = {*CELLS, *SCHEDULES}
    around = {cell for cell in every if cell.layout != CORE}
    for says, number in (
        ("in {} cells: 13 models", len(around)),
        ("`make test-all` has {}:", len(around & {*FEW_RANKS, *any_three(), *any_two()})),
        ("`make test` has {}, in", len(around & {*any_two()})),
        ("{} have to be refused", sum(is_refused(cell) for cell in around)),
        ("({} cells of the matrix, some", len(every - around)),
        ("{} cells of the matrix, in", len(on_pretended_gpu())),
    ):
        assert says.format(f"{number:,}") in page


def is_refused(cell: Cell) -> bool:
    """As tests/matrix.py expects it."""
    without_rows = cell.layout == "rows" and cell.model in WITHOUT_ROWS
    return without_rows or bool(cell.offload and cell.init == "after")


def test_every_way_to_set_it_up_is_in_the_matrix():
    assert len(set(CELLS)) == len(CELLS) and len(CELLS) + len(SCHEDULES) >= 1500
    assert {cell.world_size for cell in FEW_RANKS} == {1, 2}
    for cells in (FEW_RANKS, MANY_RANKS, SCHEDULES, any_three()):
        for field in ("backward", "forward", "limit"):
            for strategy in {cell.strategy for cell in cells}:
                values = {getattr(c, field) for c in cells if c.strategy == strategy}
                assert len(values) >= 3, (field, strategy)

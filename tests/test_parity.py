"""The claim that matters: the losses and parameters of DistributedDataParallel."""

from itertools import product
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized

from minifsdp import BackwardPrefetch, ForwardPrefetch, ShardingStrategy, SynchronizeAfterFree
from tests.models import CASES
from tests.parity import check_parity, delays, reference
from tests.ranks import on_ranks, run

STRATEGIES = {s.name: s for s in ShardingStrategy if "HYBRID" not in s.name}
BACKWARD = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
FORWARD = {"pre": ForwardPrefetch.FORWARD_PRE, "post": ForwardPrefetch.FORWARD_POST, "none": False}
LIMITS = {"2": True, "1": 1, "none": False, "sync": SynchronizeAfterFree()}
WORLDS = (1, 2, 3, 4)

MATRIX = list(product(CASES, WORLDS, STRATEGIES, BACKWARD))


def check_row(name: str, strategy: str, backward: str) -> float:
    """All forward prefetches and limits of one row of the matrix."""
    return max(
        check_parity(
            name,
            sharding_strategy=STRATEGIES[strategy],
            backward_prefetch=BACKWARD[backward],
            forward_prefetch=forward,
            limit_all_gathers=limit,
        )
        for forward in FORWARD.values()
        for limit in LIMITS.values()
    )


@pytest.mark.slow
class TestMatrix(TestCase):
    @parameterized.expand(MATRIX)
    def test_equal_to_ddp(self, name: str, world_size: int, strategy: str, backward: str) -> None:
        run(check_row, world_size, name, strategy, backward)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_the_defaults_are_bit_equal_to_ddp(name):
    check_parity(name)


@pytest.mark.parametrize("where", ["loss", "reduction", "gather", "free"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_delays_change_nothing(strategy, where):
    with delays(where):
        for name in ("mlp_nested", "transformer"):
            check_parity(name, sharding_strategy=STRATEGIES[strategy], forward_prefetch=True)


@on_ranks(2)
def test_ranks_really_see_different_data():
    losses, _ = reference("mlp_some")
    gathered = [torch.empty_like(losses[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, losses[0])
    assert gathered[0] != gathered[1]

"""agreement_groups.py: which ranks have to agree on which units."""

import pytest
import torch.distributed as dist
from torch import nn

from minifsdp import CustomPolicy, ShardingStrategy
from minifsdp.checks.agreement_groups import (
    agreement_groups,
    format_by_rank,
    format_ranks,
)
from tests.checks.test_rank_agreement import NO_SHARD, every_strategy, wrap
from tests.parity import alone
from tests.ranks import on_ranks


def found(model):
    """The names of the units of each agreement group, and how many process groups it has."""
    groups = agreement_groups(model.engine.units)
    return [([unit.name for unit in g.units], len(g.process_groups)) for g in groups]


@every_strategy
@on_ranks(4)
def test_units_of_all_ranks_are_in_one_group(strategy):
    hybrid = strategy.name.endswith("ZERO2") or strategy is ShardingStrategy.HYBRID_SHARD
    model = wrap(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))),
        strategy,
        auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, nn.Linear)),
    )
    assert found(model) == [(["", "0", "1", "2"], 2 if hybrid else 1)]


@pytest.mark.parametrize("strategy", [NO_SHARD, ShardingStrategy.FULL_SHARD])
@on_ranks(4)
def test_experts_have_groups_of_their_own_and_that_of_all_ranks_comes_last(strategy):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    groups = {module[0]: alone(), module[1]: pair, module[2]: dist.new_group()}
    policy = CustomPolicy(lambda m: {"process_group": groups[m]} if m in groups else False)
    model = wrap(module, strategy, auto_wrap_policy=policy)
    assert found(model) == [(["1"], 1), (["", "2"], 1)]


def test_ranks_that_do_the_same_are_named_together():
    assert format_by_rank({0: "this", 3: "that", 2: "this"}) == "ranks 0, 2: this; rank 3: that"


@pytest.mark.direct
def test_the_ranks_of_a_group_are_said_in_a_few_words():
    assert format_ranks([0, 2, 1]) == "[0, 2, 1]" and format_ranks([7]) == "[7]"
    assert format_ranks(range(1024)) == "[0, 1, ..., 1023]"
    assert format_ranks(range(3, 1024, 8)) == "[3, 11, ..., 1019]"


@pytest.mark.direct
def test_other_ranks_have_another_text():
    some = [range(9), range(10), range(0, 18, 2), range(1, 10), [*range(8), 9], [*range(8), 9, 10]]
    assert len({format_ranks(ranks) for ranks in some}) == len(some)

"""rank_circles.py: who has to be in step with whom."""

import pytest
import torch.distributed as dist
from torch import nn

from minifsdp import CustomPolicy, ShardingStrategy
from minifsdp.checks.rank_circles import by_rank, circles, groups_with_peers
from minifsdp.sim import cluster
from tests.checks.test_rank_agreement import NO_SHARD, every_strategy, wrap
from tests.parity import alone
from tests.ranks import on_ranks


def found(model):
    """The members of each circle, by name, and how many groups word goes along."""
    return [([u.name for u in c.members], len(c.groups)) for c in circles(model.engine.units)]


@every_strategy
@on_ranks(4)
def test_units_of_all_ranks_are_in_one_circle(strategy):
    hybrid = strategy.name.endswith("ZERO2") or strategy is ShardingStrategy.HYBRID_SHARD
    model = wrap(
        nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))),
        strategy,
        auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, nn.Linear)),
    )
    assert found(model) == [(["", "0", "1", "2"], 2 if hybrid else 1)]


@pytest.mark.parametrize("strategy", [NO_SHARD, ShardingStrategy.FULL_SHARD])
@on_ranks(4)
def test_experts_have_circles_of_their_own_and_that_of_all_comes_last(strategy):
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    groups = {module[0]: alone(), module[1]: pair, module[2]: dist.new_group()}
    policy = CustomPolicy(lambda m: {"process_group": groups[m]} if m in groups else False)
    model = wrap(module, strategy, auto_wrap_policy=policy)
    assert found(model) == [(["1"], 1), (["", "2"], 1)]


@on_ranks(2)
def test_there_is_nobody_to_talk_to_in_some_groups():
    assert groups_with_peers([None, alone(), dist.group.WORLD]) == [dist.group.WORLD]


def test_ranks_that_are_played_never_answer():
    with cluster(nodes=1, gpus_per_node=2, kind="cpu"):
        assert dist.get_world_size() == 2 and groups_with_peers([dist.group.WORLD]) == []


def test_ranks_that_do_the_same_are_named_together():
    assert by_rank({0: "this", 3: "that", 2: "this"}) == "ranks 0, 2: this; rank 3: that"

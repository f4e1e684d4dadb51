"""groups.py: who shares parameters with whom, who holds copies of the same chunk."""

import re
import socket
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp import ShardingStrategy
from minifsdp.comm import groups
from minifsdp.comm.consensus import gather_objects
from minifsdp.comm.groups import Placement, place
from minifsdp.core.flatten import flatten
from minifsdp.core.shard import shard
from tests.ranks import device, on_ranks
from tests.small import batch, layers, mean_gradients, stack, step

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_ZERO2 = ShardingStrategy


def found(placement: Placement) -> tuple:
    """The ranks of the two groups, and the bit."""
    lines = [g and dist.get_process_group_ranks(g) for g in placement[:2]]
    return (*lines, placement.reshard_after_forward)


def mine(*lines: list[int]) -> dist.ProcessGroup:
    """This rank's of several groups."""
    made = [(line, dist.new_group(line)) for line in lines]
    return next(group for line, group in made if dist.get_rank() in line)


def mesh(*ranks) -> DeviceMesh:
    return DeviceMesh(device().type, list(ranks))


@contextmanager
def hosts(*names: str):
    """Inside, each rank is on the host of that name."""
    groups.groups_by_host.cache_clear()
    with patch.object(socket, "gethostname", lambda: names[dist.get_rank()]):
        yield
    groups.groups_by_host.cache_clear()


def check_gradients(expected: dict[str, torch.Tensor], **settings) -> None:
    """A step leaves this rank's chunk of the ``expected`` gradients."""
    model = stack(2, **settings)
    step(model)
    for unit in model.engine.units:
        full_names = (f"{unit.name}.{s.name}" if unit.name else s.name for s in unit.param_infos)
        flat = flatten([expected[name] for name in full_names])
        chunk = shard(flat, unit.shard_rank, unit.shard_world_size)[
            : unit.sharded_flat_param.numel()
        ]
        torch.testing.assert_close(unit.sharded_flat_param.grad, chunk, rtol=1e-5, atol=1e-6)


def mean_over_all() -> dict[str, torch.Tensor]:
    plain = layers(2)
    return mean_gradients(plain, plain(batch()).pow(2).sum())


@on_ranks(3)
def test_by_default_everybody_takes_part():
    world = [0, 1, 2]
    assert found(place(FULL_SHARD, None, None)) == (world, None, True)
    assert found(place(SHARD_GRAD_OP, None, None)) == (world, None, False)
    assert found(place(NO_SHARD, None, None)) == (None, world, False)


@on_ranks(4)
def test_a_group_or_a_mesh_of_one_dimension_says_who_takes_part():
    group, row = mine([0, 3], [1, 2]), [0, 3] if dist.get_rank() in (0, 3) else [1, 2]
    assert found(place(FULL_SHARD, group, None)) == (row, None, True)
    assert found(place(NO_SHARD, group, None)) == (None, row, False)
    grid = init_device_mesh(device().type, (2, 2), mesh_dim_names=("upper", "lower"))
    row = [0, 1] if dist.get_rank() < 2 else [2, 3]
    assert found(place(SHARD_GRAD_OP, None, grid["lower"])) == (row, None, False)


GRIDS = {
    "pair": lambda: {"process_group": (mine([0, 1], [2, 3]), mine([0, 2], [1, 3]))},
    "list": lambda: {"process_group": [mine([0, 1], [2, 3]), mine([0, 2], [1, 3])]},
    "mesh": lambda: {"device_mesh": init_device_mesh(device().type, (2, 2))},
    "two dimensions of three": lambda: {
        "device_mesh": init_device_mesh(device().type, (2, 1, 2), mesh_dim_names=tuple("abc"))[
            "a", "c"
        ]
    },
    "hosts": dict,
}


@pytest.mark.parametrize("given", GRIDS)
@on_ranks(4)
def test_hybrid_strategies_take_a_row_and_a_column(given):
    with hosts("a", "a", "b", "b"):
        groups = {"process_group": None, "device_mesh": None, **GRIDS[given]()}
        row = [0, 1] if dist.get_rank() < 2 else [2, 3]
        column = [0, 2] if dist.get_rank() % 2 == 0 else [1, 3]
        assert found(place(HYBRID_SHARD, **groups)) == (row, column, True)
        assert found(place(HYBRID_ZERO2, **groups)) == (row, column, False)


@on_ranks(4)
def test_rows_are_hosts_in_whatever_order_their_ranks_are():
    with hosts("x", "y", "y", "x"):
        shards, replicas, _ = found(place(HYBRID_SHARD, None, None))
    assert (shards, replicas) == {
        0: ([0, 3], [0, 1]), 1: ([1, 2], [0, 1]), 2: ([1, 2], [2, 3]), 3: ([0, 3], [2, 3]),
    }[dist.get_rank()]  # fmt: skip
    again = (mine([0, 3], [1, 2]), mine([0, 1], [2, 3]))
    assert found(place(HYBRID_SHARD, again, None)) == (shards, replicas, True)


@on_ranks(4)
def test_one_host_is_one_row():
    assert found(place(HYBRID_SHARD, None, None)) == ([0, 1, 2, 3], [dist.get_rank()], True)


@on_ranks(4)
def test_groups_of_hosts_are_made_once():
    with hosts("a", "a", "b", "b"):
        first = place(HYBRID_SHARD, None, None)
        with patch.object(dist, "new_group", None), patch.object(groups, "gather_objects", None):
            assert place(HYBRID_ZERO2, None, None)[:2] == first[:2]


@pytest.mark.parametrize("strategy", [HYBRID_SHARD, HYBRID_ZERO2])
@pytest.mark.parametrize("given", ["hosts", (4, 1), (2, 2), (1, 4)], ids=str)
@on_ranks(4)
def test_hybrid_gradients_are_the_mean_over_all_ranks(strategy, given):
    # With shards on one rank each, (4, 1), torch averages over none and divides by all.
    expected = mean_over_all()
    with hosts("x", "y", "y", "x"):
        grid = {} if given == "hosts" else {"device_mesh": init_device_mesh(device().type, given)}
        check_gradients(expected, sharding_strategy=strategy, **grid)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@on_ranks(3)
def test_gradients_are_the_mean_over_the_group_that_was_given(strategy):
    group = mine([0, 2], [1])
    plain = layers(2)
    plain(batch()).pow(2).sum().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for grad in expected.values():
        dist.all_reduce(grad, group=group)
        grad.div_(group.size())
    check_gradients(expected, sharding_strategy=strategy, process_group=group)


@on_ranks(4)
def test_hosts_with_different_numbers_of_ranks_are_refused_on_all():
    with (
        hosts("a", "b", "a", "a"),
        pytest.raises(ValueError, match=r"found a: 3, b: 1\. Pass process_group="),
    ):
        place(HYBRID_SHARD, None, None)


NO_GRIDS = {
    "the same group twice": lambda: {"process_group": (dist.group.WORLD, dist.group.WORLD)},
    "columns that cross": lambda: {"process_group": (mine([0, 1], [2, 3]), mine([0, 3], [1, 2]))},
    "a column too few": lambda: {"process_group": (mine([0, 1], [2, 3]), mine([0, 2], [1], [3]))},
    "rows of different lengths": lambda: {
        "process_group": (mine([0, 1, 2], [3]), mine([0, 3], [1], [2]))
    },
    "a mesh with its ranks in another order": lambda: {"device_mesh": mesh([0, 3], [2, 1])},
}


@pytest.mark.parametrize("given", NO_GRIDS)
@on_ranks(4)
def test_groups_that_are_no_grid_are_refused_on_all_ranks(given):
    # Gradients of different chunks would be averaged, or some not at all, without a word.
    arguments = {"process_group": None, "device_mesh": None, **NO_GRIDS[given]()}
    with pytest.raises(ValueError, match="rows and the columns of a grid") as refusal:
        place(HYBRID_SHARD, **arguments)
    assert f"Rank {dist.get_rank()} shards with the ranks [" in str(refusal.value)
    assert gather_objects("still there", dist.group.WORLD) == ["still there"] * 4


@on_ranks(4)
def test_the_mesh_of_a_grid_has_the_replicas_first():
    pair = mine([0, 1], [2, 3]), mine([0, 2], [1, 3])
    grid = groups.mesh_of(place(HYBRID_SHARD, pair, None), device().type)
    assert grid.mesh.tolist() == [[0, 1], [2, 3]]
    for name, lines in (("replicate", ([0, 2], [1, 3])), ("shard", ([0, 1], [2, 3]))):
        ranks = next(line for line in lines if dist.get_rank() in line)
        assert dist.get_process_group_ranks(grid.get_group(name)) == ranks


def refused(strategy: ShardingStrategy, process_group=None, device_mesh=None) -> str:
    with pytest.raises(ValueError) as refusal:
        place(strategy, process_group, device_mesh)
    return str(refusal.value)


@on_ranks(2)
def test_groups_that_do_not_fit_the_strategy_are_refused():
    world, line = dist.group.WORLD, mesh(0, 1)
    grid = init_device_mesh(device().type, (1, 2))
    for strategy in ShardingStrategy:
        assert "process_group or device_mesh, not both" in refused(strategy, world, line)
        assert "a DeviceMesh, as init_device_mesh() makes" in refused(strategy, None, [0, 1])
    for strategy in (FULL_SHARD, SHARD_GRAD_OP, NO_SHARD):
        for message in (refused(strategy, None, grid), refused(strategy, (world, world))):
            assert f"{strategy.name} takes one process group" in message
            assert "a device_mesh of one dimension, not (<" in message and "HYBRID" in message
    for strategy in (HYBRID_SHARD, HYBRID_ZERO2):
        assert "two dimensions, (replicate, shard), not <" in refused(strategy, None, line)
        for given in (world, (world,), (world, world, world), (world, None)):
            message = refused(strategy, given)
            assert "a pair of process groups, (shard group, replicate group), or" in message


@on_ranks(3)
def test_a_rank_outside_is_refused_by_its_number():
    group, line = dist.new_group([0, 1]), mesh(0, 1)
    if dist.get_rank() < 2:
        assert found(place(FULL_SHARD, group, None)) == ([0, 1], None, True)
        assert found(place(FULL_SHARD, None, line)) == ([0, 1], None, True)
    else:
        assert "On a rank outside of a group new_group() gives no group" in refused(
            FULL_SHARD, group
        )
        assert "rank 2 is not in device_mesh, whose ranks are [0, 1]" in refused(
            FULL_SHARD, None, line
        )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", None, *theirs.ShardingStrategy], ids=str)
@on_ranks(1)
def test_a_strategy_of_another_kind_is_refused(strategy):
    # torch's enum has the same words; taken for anything else than ours it would be SHARD_GRAD_OP.
    with pytest.raises(TypeError, match=re.escape(f"minifsdp.ShardingStrategy, not {strategy!r}")):
        place(strategy, None, None)


def test_without_a_process_group_it_says_how_to_get_one():
    with pytest.raises(RuntimeError, match=r"torchrun and call .*init_process_group\(\) first"):
        place(FULL_SHARD, None, None)

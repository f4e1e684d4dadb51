"""Checks of comm/groups.py, on four ranks."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tutorials.exercises.catalog import check
from tutorials.exercises.observe import refused


def _ranks(group: Any) -> Any:
    import torch.distributed as dist

    return None if group is None else dist.get_process_group_ranks(group)


def _mine(*lines: list[int]) -> Any:
    """This rank's of several groups."""
    import torch.distributed as dist

    made = [(line, dist.new_group(line)) for line in lines]
    return next(group for line, group in made if dist.get_rank() in line)


def _parts(what: str, placement: Any) -> Iterator[Any]:
    yield f"{what}: ranks that shard", _ranks(placement.shard_group)
    yield f"{what}: ranks that replicate", _ranks(placement.replicate_group)
    yield f"{what}: whether it frees after forward", placement.reshard_after_forward


def _table(what: str, want: Any, got: Any) -> str | None:
    if what.startswith("NO_SHARD") and "free" not in what:
        return "with NO_SHARD nobody shards, and all ranks of the group replicate"
    if "whether" in what:
        return "only FULL_SHARD and HYBRID_SHARD free the parameters between forward and backward"
    if ("HYBRID" in what or "ZERO2" in what) and "ranks that" in what:
        return "a hybrid pair is (shard group, replicate group): did the two change places?"
    if "ranks that" in what:
        return "FULL_SHARD and SHARD_GRAD_OP shard over the whole group, and nobody replicates"
    if what.startswith("refused") and got == "no exception":
        return "what cannot be right has to be refused: see Raises in the docstring"
    if what.startswith("refused"):
        return "another exception is raised than the docstring says"
    return None


@check("groups.1", ranks=4, because=_table)
def two_groups_and_a_bit() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import ShardingStrategy
    from minifsdp.comm.groups import place

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = _mine([0, 1], [2, 3]), _mine([0, 2], [1, 3])
    some = _mine([0, 3], [1, 2])
    for strategy in ShardingStrategy:
        name = strategy.name
        if "HYBRID" in name:
            yield from _parts(f"{name} with a pair of groups", place(strategy, pair, None))
            yield from _parts(f"{name} with a mesh", place(strategy, None, grid))
        else:
            yield from _parts(f"{name} of all ranks", place(strategy, None, None))
            yield from _parts(f"{name} with a group", place(strategy, some, None))
            yield from _parts(f"{name} with a mesh", place(strategy, None, grid["shard"]))
    full, world = ShardingStrategy.FULL_SHARD, dist.group.WORLD
    yield "refused, a strategy that is a text", refused(lambda: place("FULL_SHARD", None, None))
    yield "refused, a group and a mesh", refused(lambda: place(full, world, grid["shard"]))
    yield "refused, two groups for FULL_SHARD", refused(lambda: place(full, pair, None))
    yield (
        "refused, one group for HYBRID_SHARD",
        refused(lambda: place(ShardingStrategy.HYBRID_SHARD, world, None)),
    )


@check("groups.1", ranks=2, because=_table)
def every_strategy_trains() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from minifsdp import ShardingStrategy
    from tutorials.exercises.exact import train, wrapped

    for strategy in ShardingStrategy:
        mesh = init_device_mesh("cpu", (2, 1)) if "HYBRID" in strategy.name else None
        model = wrapped(sharding_strategy=strategy, device_mesh=mesh)
        yield f"losses with {strategy.name}", train(model)
        yield f"parameters with {strategy.name}", model.state_dict()


@check("groups.1", because=_table)
def without_a_process_group() -> Iterator[Any]:
    from minifsdp import ShardingStrategy
    from minifsdp.comm.groups import place

    for strategy in ShardingStrategy:
        yield (
            f"refused, {strategy.name} without a process group",
            refused(lambda s=strategy: place(s, None, None)),
        )


def _grid(what: str, want: Any, got: Any) -> str | None:
    if "different numbers" in what:
        return "without as many ranks on each host there are no columns: refuse it on all ranks"
    if isinstance(want, list) and isinstance(got, list):
        if want == got[::-1] or (what.startswith("the row") and len(want) != len(got)):
            return "a host is a row; columns go across hosts. The row comes first"
        if what.startswith("the row"):
            return "a row is the ranks with the same host name, wherever their numbers are"
        return "the k-th column is made of the k-th rank of each row"
    if "tensor" in what or "raised" in str(got):
        return "all ranks have to make all groups, in the same order; each keeps the one it is in"
    return None


@check("groups.2", ranks=4, because=_grid)
def hosts_are_rows() -> Iterator[Any]:
    import torch
    import torch.distributed as dist

    from minifsdp import ShardingStrategy
    from minifsdp.comm.groups import groups_by_host
    from tutorials.exercises.exact import train, wrapped

    for names in ("aabb", "abba", "abab", "aaaa", "abcd"):
        getattr(groups_by_host, "cache_clear", lambda: None)()
        with patch("socket.gethostname", lambda n=names: n[dist.get_rank()]):
            row, column = groups_by_host(dist.group.WORLD)
        hosts = f"with ranks on the hosts {' '.join(names)}"
        yield f"the row {hosts}", _ranks(row)
        yield f"the column {hosts}", _ranks(column)
        sums = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(sums, group=row)
        dist.all_reduce(sums, group=column)
        yield f"a tensor added up over row and column, {hosts}", sums
    getattr(groups_by_host, "cache_clear", lambda: None)()
    with patch("socket.gethostname", lambda: "abab"[dist.get_rank()]):
        model = wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    yield "losses with HYBRID_SHARD", train(model)
    yield "parameters with HYBRID_SHARD", model.state_dict()
    # Last, because a rank that goes on here may keep others waiting for ever.
    getattr(groups_by_host, "cache_clear", lambda: None)()
    with patch("socket.gethostname", lambda: "abaa"[dist.get_rank()]):
        yield (
            "hosts with different numbers of ranks",
            refused(lambda: groups_by_host(dist.group.WORLD)),
        )


@check("groups.2", because=_grid)
def machines_on_a_gpu() -> Iterator[Any]:
    import torch.distributed as dist

    from minifsdp.comm.groups import groups_by_host
    from minifsdp.sim import cluster

    with cluster(nodes=2, gpus_per_node=4):
        row, column = groups_by_host(dist.group.WORLD)
        yield "the row of rank 0 on two machines of four", _ranks(row)
        yield "the column of rank 0 on two machines of four", _ranks(column)

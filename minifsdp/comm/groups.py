"""Process groups: which ranks shard and which replicate. A strategy is two groups and a bit.

Ranks stand in a grid. The ranks of a row *shard*: each of them has a different chunk of every
parameter. The ranks of a column *replicate*: all of them have the same chunk, so only gradients
travel between them. Four machines with two GPUs each::

                         shard -->
                    rank 0   rank 1          FULL_SHARD     one row of all ranks
    replicate  |    rank 2   rank 3          NO_SHARD       one column of all ranks
               v    rank 4   rank 5          HYBRID_SHARD   rows within a machine, where the network
                    rank 6   rank 7                         is fast, and columns across machines

The bit says whether to free the parameters between forward and backward.

PyTorch's FSDP treats HYBRID_SHARD with rows of one rank as NO_SHARD and then reduces over the row
instead of the column, so its replicas drift apart (pytorch#154888). Here rows may have length one.

Sources: the "hybrid sharding" of Zhao et al., arXiv:2304.11277; MiCS, arXiv:2205.00119.
"""

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.comm.consensus import gather_objects
from minifsdp.comm.message_tags import cached, check_exists
from minifsdp.core.api import ShardingStrategy
from minifsdp.core.collectives import Group


class Placement(NamedTuple):
    """Which ranks have the parameters of one unit."""

    shard_group: Group | None  # ranks that have one chunk each; None: each rank has all
    replicate_group: Group | None  # ranks that have the same chunk, and all-reduce its gradient
    reshard_after_forward: bool


HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def place(strategy: ShardingStrategy, process_group: Any, device_mesh: Any) -> Placement:
    """The two groups and the bit of a strategy.

    Args:
        process_group: the user's; None means all ranks. For hybrid strategies it is a pair (shard
            group, replicate group), and None means that the ranks of each host shard.
        device_mesh: instead of ``process_group``: one dimension, or for hybrid strategies two,
            (replicate, shard), as in torch.

    Raises:
        TypeError: ``strategy`` is something else, such as torch's enum of the same name.
        ValueError: groups and strategy do not fit together, or both groups and mesh are given, or
            the two groups are not a row and a column of a grid. If ranks have to compare something
            to find that out, all ranks of a row raise it.
        RuntimeError: there is no process group.
    """
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(
            f"sharding_strategy is a minifsdp.ShardingStrategy, not {strategy!r} "
            f"({type(strategy).__module__}.{type(strategy).__name__})"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group. Start the program with torchrun and "
            "call torch.distributed.init_process_group() first."
        )
    # A mesh becomes groups first, so that the strategies below know one kind of argument only.
    groups = process_group if device_mesh is None else _mesh_groups(process_group, device_mesh)
    if strategy in HYBRID:
        shard, replicate = _pair(groups)
        return Placement(shard, replicate, strategy is ShardingStrategy.HYBRID_SHARD)
    group = _single(strategy, groups)
    if strategy is ShardingStrategy.NO_SHARD:
        return Placement(None, group, False)
    return Placement(group, None, strategy is ShardingStrategy.FULL_SHARD)


def _mesh_groups(process_group: Any, mesh: Any) -> Group | tuple[Group, ...]:
    """The process groups of a device mesh, in the form of the argument ``process_group``: one, or
    the groups of its dimensions with the last dimension (shard) first."""
    if process_group is not None:
        raise ValueError("pass process_group or device_mesh, not both: each says who takes part.")
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"device_mesh is a DeviceMesh, as init_device_mesh() makes them, not {mesh!r}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in device_mesh, whose ranks are {mesh.mesh.tolist()}: "
            f"do not wrap there."
        )
    groups = tuple(mesh.get_group(dimension) for dimension in reversed(range(mesh.ndim)))
    return groups[0] if len(groups) == 1 else groups


def _single(strategy: ShardingStrategy, group: Any) -> Group:
    if group is None:
        return _all_ranks()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"{strategy.name} takes one process group, or a device_mesh of one dimension, not "
            f"{group!r}. (A pair of shard and replicate group, or a device_mesh of two dimensions, "
            f"(replicate, shard), is for HYBRID_SHARD. On a rank outside of a group new_group() "
            f"gives no group: do not wrap there.)"
        )
    return group


def _pair(groups: Any) -> tuple[Group, Group]:
    if groups is None:
        return groups_by_host(_all_ranks())
    pair = tuple(groups) if isinstance(groups, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(group, dist.ProcessGroup) for group in pair):
        raise ValueError(
            f"hybrid sharding takes a pair of process groups, (shard group, replicate group), or a "
            f"device_mesh of two dimensions, (replicate, shard), not {groups!r}. Leave both out to "
            f"shard within each host."
        )
    return check_grid(*pair)


@cached  # every unit that is wrapped by hand asks for it, and making groups is slow
def groups_by_host(group: Group) -> tuple[Group, Group]:
    """The row and the column of this rank, if each host is a row.

    All ranks of the default group have to call it, because each takes part in making each group.

    Raises:
        ValueError: hosts have different numbers of ranks, so that there are no columns.
    """
    ranks = dist.get_process_group_ranks(group)
    hosts: dict[str, list[int]] = {}
    for rank, host in zip(ranks, hosts_of(group), strict=True):
        hosts.setdefault(host, []).append(rank)
    rows = list(hosts.values())
    if len({len(row) for row in rows}) > 1:
        found = ", ".join(f"{host}: {len(row)}" for host, row in hosts.items())
        raise ValueError(
            f"hybrid sharding needs as many ranks on each host as on any other; found {found}. "
            f"Pass process_group=(shard group, replicate group) to arrange them yourself."
        )
    columns = [list(column) for column in zip(*rows, strict=True)]
    return _mine(rows), _mine(columns)


def hosts_of(group: Group) -> list[str]:
    """The name of the host that each rank of a group is on, in the order of the group."""
    return gather_objects(socket.gethostname(), group, "the comparison of host names")


@cached  # so that all units of the same ranks have the same one
def mesh_of(placement: Placement, device_type: str) -> DeviceMesh:
    """The ranks of a placement as a DeviceMesh, which DTensors need: of the ranks that shard, of
    those that replicate, or of both with the dimensions (replicate, shard)."""
    shard, replicate = placement.shard_group, placement.replicate_group
    for found in filter(None, (shard, replicate)):
        check_exists(found)
    if shard is None or replicate is None:
        group = shard or replicate
        assert group is not None
        return DeviceMesh.from_group(group, device_type)
    row = dist.get_process_group_ranks(shard)
    rows = gather_objects(row, replicate, "the grid of hybrid sharding")
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=sorted(rows), mesh_dim_names=("replicate", "shard")
    )


@cached
def check_grid(shard: Group, replicate: Group) -> tuple[Group, Group]:
    """The same two groups, after comparing with the other ranks that they are those of a grid.

    Raises:
        ValueError: they are not, so gradients of different chunks would be averaged. All ranks of a
            row raise it.
    """
    if "fake" in dist.get_backend_config(shard):
        return shard, replicate  # torch's fake ranks never answer
    row, column = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    about = "the comparison of the groups of hybrid sharding"
    rows = sorted(gather_objects(row, replicate, about))
    found = gather_objects((column, rows), shard, about)
    # Each rank of a row sees the rows that its own column crosses. In a grid all of them see the
    # same rows, which are equally long, and the k-th rank's column is made of their k-th ranks.
    columns = [sorted(line) for line in zip(*rows, strict=False)]
    if len({len(row) for row in rows}) > 1 or found != [(column, rows) for column in columns]:
        raise ValueError(
            f"the groups of hybrid sharding have to be the rows and the columns of a grid, so that "
            f"ranks that replicate hold the same chunk. Rank {dist.get_rank()} shards with the "
            f"ranks {row}, which replicate with {[column for column, _ in found]}. (A group is in "
            f"the order of its ranks.) Let device_mesh=init_device_mesh(..., (replicas, shards)) "
            f"make the groups."
        )
    return shard, replicate


@cached  # so that all units of the same ranks have the same one
def smaller_group(group: Group, lines: tuple[tuple[int, ...], ...]) -> Group:
    """Make a group of each line of ranks, and return the one that this rank is in. All ranks of the
    program have to call this: torch names groups by counting them, so a rank that has made one
    more before would wait for the others under a different name.

    Args:
        group: that of the units that ask. For each such group smaller ones are made.
        lines: global ranks; each is in one line.
    """
    return _mine([list(line) for line in lines])


def _mine(lines: list[list[int]]) -> Group:
    """Make a group of each line of ranks, and return the one that this rank is in."""
    groups = [(line, dist.new_group(line)) for line in lines]
    mine: Group = next(group for line, group in groups if dist.get_rank() in line)
    return mine


def carries(group: Group, device: torch.device) -> bool:
    """Whether the collectives of a group take tensors on devices of this type."""
    return f"{device.type}:" in dist.get_backend_config(group)  # "cuda:nccl", say


def _all_ranks() -> Group:
    group = dist.group.WORLD
    assert group is not None  # place() has checked that it is initialized
    return group

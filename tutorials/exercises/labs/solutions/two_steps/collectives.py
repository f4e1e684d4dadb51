"""An all-gather in two steps, where a group has ranks on several nodes.

Each rank first gathers the chunks of the ranks in the same place of the other nodes, so that a
chunk comes to each node once. The GPUs of a node do so at the same time and share its network. Then
the ranks of a node exchange what they have, over fast links.
"""

from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minifsdp.core.collectives import Group
from minifsdp.core.collectives import TorchCollectives as InOneStep
from minifsdp.core.streams import Finish


@cache
def rows_and_columns(group: Group) -> tuple[Group, Group] | None:
    """The ranks of this node, and those in the same place of the others; None for one step."""
    from minifsdp.comm import groups

    if group is not dist.group.WORLD:
        return None  # not all ranks are here to make new groups
    hosts = groups.hosts_of(group)
    each = len(hosts) // len(set(hosts))
    in_order = hosts == [host for host in hosts[::each] for _ in range(each)]
    if len(set(hosts)) in (1, len(hosts)) or not in_order:
        return None
    return groups.groups_by_host(group)


class TorchCollectives(InOneStep):
    """Gathers in two steps, and reduces in one."""

    def all_gather(self, unit: Any, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """Fill ``full`` with the shards of all ranks, in rank order."""
        in_one_step, grid = super().all_gather, rows_and_columns(group)
        if grid is None:
            return in_one_step(unit, full, shard, group)
        row, column = grid
        received = shard.new_empty(column.size() * shard.numel())  # a shard of each node
        finish = in_one_step(unit, received, shard, column)

        def second_step() -> None:
            finish()
            gathered = full.new_empty(full.shape)  # [rank in its node][node]
            in_one_step(unit, gathered, received, row)()
            by_node = gathered.view(row.size(), column.size(), -1).transpose(0, 1)
            full.view(column.size(), row.size(), -1).copy_(by_node)

        return second_step

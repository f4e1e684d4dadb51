"""An all-gather in two steps, where a group has ranks on several nodes.

Each rank first gathers the chunks of the ranks in the same place of the other nodes, so that a
chunk comes to each node once. The GPUs of a node do so at the same time and share its network. Then
the ranks of a node exchange what they have, over fast links.
"""

from functools import cache

import torch.distributed as dist
from torch import Tensor

from minifsdp.collectives import Group
from minifsdp.comm.blocks import Blocks
from minifsdp.comm.collectives import all_gather as in_one_step
from minifsdp.comm.message_tags import Kind
from minifsdp.streams import Finish


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


def all_gather(
    full: Tensor,
    chunk: Tensor,
    group: Group,
    tag: int,
    label: str = "",
    kind: Kind = Kind.PARAMETERS,
    blocks: Blocks | None = None,
) -> Finish:
    """Fill ``full`` with the chunks of all ranks, in rank order."""
    is_chunks = kind is Kind.PARAMETERS and blocks is None
    grid = rows_and_columns(group) if is_chunks else None
    if grid is None:
        return in_one_step(full, chunk, group, tag, label, kind, blocks)
    row, column = grid
    received = chunk.new_empty(column.size() * chunk.numel())  # a chunk of each node
    finish = in_one_step(received, chunk, column, tag, label, kind)

    def second_step() -> None:
        finish()
        gathered = full.new_empty(full.shape)  # [rank in its node][node]
        in_one_step(gathered, received, row, tag, label, kind)()
        by_node = gathered.view(row.size(), column.size(), -1).transpose(0, 1)
        full.view(column.size(), row.size(), -1).copy_(by_node)

    return second_step

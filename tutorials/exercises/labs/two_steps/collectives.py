"""Lab: an all-gather in two steps, for nodes with a fast network inside and a slow one between.

In a ring over all ranks each piece passes every rank. Two steps can do with less: gather between
the nodes, and gather within each node.

Measured: the time of an evaluation step on a virtual GPU, on two nodes of eight GPUs. Its gathers
are all that it sends. Less is better.
Rules: each chunk arrives in its place, in rank order, on four real ranks. A training step has no
races. Reserved memory is at most a quarter more.

``TorchCollectives`` here takes the place of the engine's, which is what units send with on GPUs.
This one is the engine's. From ``minifsdp.comm.groups`` you can import, inside of a function, since
that file imports this one: ``hosts_of(group)``, the host of each rank, and
``groups_by_host(group)``, the group of the ranks of this host and the group of those in the same
place on the others. All ranks have to call it together, so use two steps for ``dist.group.WORLD``
only, and keep the groups, in ``self``: the groups of one run are gone in the next. Take care of the
order of the chunks, and of memory that is still being sent.
"""

from typing import Any

from torch import Tensor

from minifsdp.core.collectives import Group
from minifsdp.core.collectives import TorchCollectives as InOneStep
from minifsdp.core.streams import Finish


class TorchCollectives(InOneStep):
    """Its reductions are the engine's."""

    def all_gather(self, unit: Any, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """Start to fill ``full`` with the shards of all ranks; returns what waits for it."""
        return super().all_gather(unit, full, shard, group)

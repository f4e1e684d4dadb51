"""Lab: an all-gather in two steps, for nodes with a fast network inside and a slow one between.

In a ring over all ranks each piece passes every rank. Two steps can do with less: gather between
the nodes, and gather within each node.

Measured: the time of an evaluation step on a virtual GPU, on two nodes of eight GPUs. Its gathers
are all that it sends. Less is better.
Rules: each chunk arrives in its place, in rank order, on four real ranks. A training step has no
races. Reserved memory is at most a quarter more.

``all_gather`` here takes the place of the engine's. This one is the engine's. From
``minifsdp.comm.groups`` you can import, inside of a function, since that file imports this one:
``hosts_of(group)``, the host of each rank, and ``groups_by_host(group)``, the group of the ranks of
this host and the group of those in the same place on the others. All ranks have to call it
together, so use two steps for ``dist.group.WORLD`` only, and keep the groups. Take care of the
order of the chunks, and of memory that is still being sent.
"""

from torch import Tensor

from minifsdp.collectives import Group
from minifsdp.comm.blocks import Blocks
from minifsdp.comm.collectives import all_gather as in_one_step
from minifsdp.comm.message_tags import Kind
from minifsdp.streams import Finish


def all_gather(
    full: Tensor,
    chunk: Tensor,
    group: Group,
    tag: int,
    label: str = "",
    kind: Kind = Kind.PARAMETERS,
    blocks: Blocks | None = None,
) -> Finish:
    """Start to fill ``full`` with the chunks of all ranks; returns what waits for it. ``blocks``
    is not None in units that are divided in rows; those may be gathered in one step."""
    return in_one_step(full, chunk, group, tag, label, kind, blocks)

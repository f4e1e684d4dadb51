"""How the tensors of a unit travel with all features: the ``comm`` of a unit (collectives.py).

::

    on a CPU, as a rule            DirectMessages
    elsewhere                      TorchCollectives --Watched-->
    elsewhere, divided in rows     TorchCollectives --Watched--> --InBlocks-->
    parameters of several dtypes   any of these --InBytes-->

Messages of a unit have its number in their tags. Errors about them name its label.
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.comm.blocks import copy_apart, together
from minifsdp.comm.collectives import all_gather, reduce_scatter
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.comm.transport import watched
from minifsdp.core.collectives import Group, TorchCollectives
from minifsdp.core.streams import Finish
from minifsdp.featured_unit import FeaturedUnit


class DirectMessages:
    """From rank to rank, directly out of and into the tensors of a unit: comm/collectives.py.

    There is no all-reduce: it goes in two halves, each of which is a stage of a reduction
    (halves.py).
    """

    def all_gather(self, unit: FeaturedUnit, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """As of :class:`~minifsdp.core.collectives.TorchCollectives`. Other ranks may read
        ``shard`` even after ``finish``, until transport.wait_for_readers()."""
        # Another group than the unit's own may divide it anywhere (post_forward.py does).
        blocks = unit.layout.blocks if group is unit.shard_group else None
        return all_gather(full, shard, group, unit.tag, unit.label, blocks=blocks)

    def reduce_scatter(
        self, unit: FeaturedUnit, flat: Tensor | Pieces, scale: float
    ) -> tuple[Tensor, Finish]:
        """As of :class:`~minifsdp.core.collectives.TorchCollectives`. Nothing is overwritten."""
        assert unit.shard_group is not None
        return reduce_scatter(
            flat, unit.shard_group, scale, unit.tag, unit.label,
            blocks=unit.layout.trained_blocks, sizes=unit.layout.sizes,
        )  # fmt: skip


class Watched:
    """Collectives that deadlock_watch.py knows of, so that it can say where each rank is. Their
    order is compared by checks/same_launches.py.

    Args:
        inner: if its ``finish`` is the ``wait`` of a ``dist.Work``, a lost rank is explained.
    """

    def __init__(self, inner: TorchCollectives) -> None:
        self.inner = inner

    def all_gather(self, unit: FeaturedUnit, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        message = Message(group, unit.tag, Kind.PARAMETERS, full.itemsize, unit.label)
        unit.launches[message.key[0]].add(message)
        return watched(self.inner.all_gather(unit, full, shard, group), message)

    def reduce_scatter(
        self, unit: FeaturedUnit, flat: Tensor | Pieces, scale: float
    ) -> tuple[Tensor, Finish]:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        flat = whole(flat)  # on a CPU it comes in pieces, also if a program's function sends it
        assert unit.shard_group is not None
        message = Message(unit.shard_group, unit.tag, Kind.REDUCTION, flat.itemsize, unit.label)
        unit.launches[message.key[0]].add(message)
        total, finish = self.inner.reduce_scatter(unit, flat, scale)
        return total, watched(finish, message)

    def all_reduce(self, unit: FeaturedUnit, flat: Tensor, scale: float, group: Group) -> Finish:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        message = Message(group, unit.tag, Kind.ALL_REDUCTION, flat.itemsize, unit.label)
        unit.launches[message.key[0]].add(message)
        return watched(self.inner.all_reduce(unit, flat, scale, group), message)


class InBlocks:
    """Collectives of units in rows: the blocks of each rank (comm/blocks.py) are copied together
    before a reduction, and apart after a gather.

    Args:
        inner: collectives that need one piece of memory for each rank.
    """

    def __init__(self, inner: TorchCollectives) -> None:
        self.inner, self.all_reduce = inner, inner.all_reduce  # a shard is in one piece

    def all_gather(self, unit: FeaturedUnit, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        blocks = unit.layout.blocks
        if group is not unit.shard_group or blocks is None:
            # Another group may divide it anywhere, and it comes end to end (post_forward.py).
            return self.inner.all_gather(unit, full, shard, group)
        gathered = torch.empty_like(full)
        arrive = self.inner.all_gather(unit, gathered, shard, group)

        def finish() -> None:
            arrive()
            copy_apart(gathered, full, blocks, group.size())

        return finish

    def reduce_scatter(
        self, unit: FeaturedUnit, flat: Tensor | Pieces, scale: float
    ) -> tuple[Tensor, Finish]:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        sent = together(whole(flat), unit.layout.trained_blocks, unit.shard_world_size)
        return self.inner.reduce_scatter(unit, sent, scale)


class InBytes:
    """Collectives of units whose parameters differ in dtype (mixed_rows.py): what is gathered is
    bytes, and so are the numbers in ``unit.layout.blocks``.

    Args:
        inner: how the bytes travel. It does all the rest: gradients stay numbers.
    """

    def __init__(self, inner: TorchCollectives) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_gather(self, unit: FeaturedUnit, full: Tensor, shard: Tensor, group: Group) -> Finish:
        """See :class:`~minifsdp.core.collectives.TorchCollectives`."""
        full, shard = full.view(torch.uint8), shard.view(torch.uint8)
        finish: Finish = self.inner.all_gather(unit, full, shard, group)
        return finish

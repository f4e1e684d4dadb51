"""The collectives of a unit, as strategies.py chooses them, without the unit."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minifsdp.comm import collectives
from minifsdp.comm.message_tags import Launches
from minifsdp.core.streams import Finish
from minifsdp.strategies import comm_of
from minifsdp.users_comm import UsersComm


def unit(
    group: dist.ProcessGroup, tag: int = 7, label: str = "", blocks: Sequence[int] | None = None
) -> Any:
    """What a way to communicate asks of a unit that the ranks of a group share.

    Args:
        blocks: of each rank, in rows; None: in chunks.
    """
    layout = SimpleNamespace(blocks=blocks, trained_blocks=blocks, sizes=None)
    return SimpleNamespace(
        shard_group=group, shard_world_size=group.size(), layout=layout, tag=tag, label=label,
        launches=defaultdict(Launches), users_comm=UsersComm(),
    )  # fmt: skip


def all_gather(
    full: Tensor, chunk: Tensor, group: dist.ProcessGroup, tag: int = 7, label: str = "", **in_: Any
) -> Finish:
    one = unit(group, tag, label, **in_)
    return comm_of(one, full.device).all_gather(one, full, chunk, group)


def reduce_scatter(
    flat: Tensor, group: dist.ProcessGroup, scale: float, tag: int = 7, **in_: Any
) -> tuple[Tensor, Finish]:
    one = unit(group, tag, **in_)
    return comm_of(one, flat.device).reduce_scatter(one, flat, scale)


def all_reduce(
    flat: Tensor, group: dist.ProcessGroup, scale: float, tag: int = 7, label: str = ""
) -> Iterator[Finish]:
    """Its halves, on a CPU; else all of it."""
    if collectives.direct(flat.device):
        return collectives.all_reduce(flat, group, scale, tag, label)
    one: Any = unit(group, tag, label)
    comm: Any = comm_of(one, flat.device)
    return iter([comm.all_reduce(one, flat, scale, group)])

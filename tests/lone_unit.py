"""One unit, without a wrapper, an engine or other ranks: what the direct tests of a concept use.

    with lone_unit(rank=1, ranks=2) as lone:
        unshard(lone.unit, lone.streams)

is rank 1's part of a unit that two ranks share. Its parameters are 1, 2, ..., 10: a weight [2, 3],
a 0-d scale, and a bias [3]. There is no process group. A stand-in for the collectives answers as
the other ranks would, and as late as it may: what it writes is NaN until somebody waits for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp import MixedPrecision
from minifsdp.comm import collectives
from minifsdp.comm.groups import Placement
from minifsdp.comm.pieces import Pieces, whole
from minifsdp.core.streams import Finish, Streams
from minifsdp.core.unit_state import Purpose
from minifsdp.core.views import hide_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.strategies import choose_strategies, set_strategies
from minifsdp.support.buffers import Buffers
from minifsdp.support.param_access import ParamInfo
from minifsdp.support.tensor_attribute import TensorAttribute
from tests.small import replaced

CPU = torch.device("cpu")
SHAPES = {"weight": (2, 3), "scale": (), "bias": (3,)}
NUMEL = 10


@dataclass
class Group:
    """Stands for the ranks that share a unit, or that have the same chunk of it."""

    its_rank: int
    its_size: int
    called: list[str] = field(default_factory=list)  # the collectives, in their order

    def rank(self) -> int:
        return self.its_rank

    def size(self) -> int:
        return self.its_size


@dataclass
class Lone:
    """A unit and what its verbs need."""

    unit: FeaturedUnit
    streams: Streams
    module: nn.Module

    @property
    def memory(self) -> int:
        """Bytes that the unsharded flat parameter takes now."""
        return self.unit.unsharded.storage.size()

    @property
    def gathered(self) -> list[float]:
        """What is in the unsharded flat parameter, after a check that it has memory."""
        assert self.memory == self.unit.unsharded.nbytes, (
            f"the unsharded flat parameter has {self.memory} bytes of memory; it needs "
            f"{self.unit.unsharded.nbytes} (unit.unsharded.allocate())"
        )
        return self.unit.unsharded.data.tolist()

    def fill(self) -> None:
        """Gather the unit by hand, for tests of what comes after."""
        self.unit.state.start_unshard()
        self.unit.unsharded.allocate()
        self.unit.unsharded.data.copy_(padded(self.unit))
        self.unit.state.finish_unshard()


def padded(unit: FeaturedUnit) -> Tensor:
    """The parameters of a lone unit, laid end to end, and zeros for the padding."""
    return torch.cat([torch.arange(1.0, NUMEL + 1), torch.zeros(unit.layout.padded_numel - NUMEL)])


@contextmanager
def lone_unit(
    rank: int = 0,
    ranks: int = 2,
    replicas: int = 1,
    precision: MixedPrecision | None = None,
    offload: bool = False,
) -> Iterator[Lone]:
    """One unit on the CPU, ready for a forward.

    Args:
        rank: this rank, in the group that shares the unit.
        ranks: how many share it; 1 is a unit that is not sharded.
        replicas: how many such groups there are.
    """
    module, infos, values = nn.Module(), [], torch.arange(1.0, NUMEL + 1)
    for name, shape in SHAPES.items():
        size = torch.Size(shape)
        param = nn.Parameter(values[: size.numel()].clone().view(size))
        values = values[size.numel() :]
        module.register_parameter(name, param)
        infos.append(ParamInfo(name, size, [TensorAttribute(module, name)]))
    placement: Any = Placement(
        Group(rank, ranks) if ranks > 1 else None,
        Group(0, replicas) if replicas > 1 else None,
        True,
    )
    unit = FeaturedUnit(
        module,
        infos,
        Buffers([module], None),
        placement,
        precision or MixedPrecision(),
        CPU if offload else None,
        tag=1,
    )
    set_strategies(unit)
    unit.rename("lone")
    unit.choose_precision(Purpose.TRAIN)
    hide_views(unit)
    streams = Streams.on(CPU)
    choose_strategies([unit], streams)
    unit.comm = OtherRanks()
    with replaced(collectives.all_reduce, unit.comm.halves):
        yield Lone(unit, streams, module)


class OtherRanks:
    """The ``comm`` of a unit whose other ranks have the other chunks of the parameters, and
    gradients of 10 in all places."""

    def all_gather(self, unit: FeaturedUnit, full: Tensor, shard: Tensor, group: Any) -> Finish:
        group.called.append("all-gather")
        assert full.dtype is shard.dtype, "a chunk is sent in the dtype that it is gathered in"
        full.fill_(torch.nan)
        chunks = list(padded(unit).to(full.dtype).tensor_split(group.size()))
        chunks[group.rank()] = shard
        return lambda: full.copy_(torch.cat(chunks))

    def reduce_scatter(
        self, unit: FeaturedUnit, flat: Tensor | Pieces, scale: float
    ) -> tuple[Tensor, Finish]:
        group: Any = unit.shard_group
        group.called.append("reduce-scatter")
        own = whole(flat).tensor_split(group.size())[group.rank()]
        total = torch.full_like(own, torch.nan)
        return total, lambda: total.copy_(scale * (own + 10 * (group.size() - 1)))

    def all_reduce(self, unit: FeaturedUnit, flat: Tensor, scale: float, group: Any) -> Finish:
        group.called.append("all-reduce")
        total = scale * (flat + 10 * (group.size() - 1))
        flat.fill_(torch.nan)
        return lambda: flat.copy_(total)

    def halves(self, flat: Tensor, group: Any, scale: float, *_: object) -> Iterator[Finish]:
        """In the place of :func:`~minifsdp.comm.collectives.all_reduce`."""
        group.called.append("all-reduce")
        total = scale * (flat + 10 * (group.size() - 1))
        flat.fill_(torch.nan)
        yield lambda: None  # the half that ends with a chunk of the sum
        group.called.append("its second half")
        yield lambda: flat.copy_(total)

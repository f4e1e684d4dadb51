"""One unit's parameters between steps as DTensors, whichever way the unit is divided.

This is the form that PyTorch has for checkpoints: each tensor under its own name, divided along its
first dimension. torch.distributed.checkpoint saves the part of each rank, and loads it into as many
ranks as there are then. A unit in rows has these DTensors already. For a unit in chunks each rank
sends the others what belongs to their rows, and gets what belongs to its own; and back::

    chunks    rank 0: a a b b c          rank 1: c x y z
    rows      rank 0: a a b b | x y      rank 1: c c | z

The same is done to the tensors of an optimizer's state, each of which has the layout of the unit's
shard (optimizer_dtensors.py). So a rank holds no more than it has to keep. Saving and loading need
no exchange: there is another :class:`Form` for them, in checkpoint_state.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from minifsdp.comm.groups import Placement, mesh_of
from minifsdp.comm.redistribute import Pieces, redistribute
from minifsdp.core.views import FLAT_PARAM, hide_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.rows import block_numel, local_shape
from minifsdp.support.dtensors import divided_alike, dtensor, like, local_of
from minifsdp.wrapping.orig_params import end_of_full_params


def chunk_to_dtensors(unit: FeaturedUnit, chunk: Tensor) -> list[DTensor]:
    """Divide in rows what has the layout of a unit's chunks. All its ranks take part.

    Args:
        chunk: ``[n]``, of any dtype: this rank's, as long as its ``unit.sharded_flat_param``.

    Returns:
        For each parameter of the unit a DTensor of its shape, with memory of its own where
        ``chunk`` is. One without dimensions has no rows, and is whole on each rank.
    """
    rows = _redistributed(unit, [chunk.detach()], _chunks(unit), _rows(unit))
    mesh, found = mesh_of_unit(unit), []
    for info, local in zip(unit.param_infos, rows, strict=True):
        shape = info.shape
        if shape:
            shape = local_shape(shape, unit.shard_rank, unit.shard_world_size)
        found.append(dtensor(unit, mesh, info.shape, local.view(shape)))
    return found


def mesh_of_unit(unit: FeaturedUnit) -> DeviceMesh:
    """The ranks that share a unit, as DTensors want to know them."""
    return mesh_of(Placement(unit.shard_group, unit.replicate_group, True), unit.device.type)


def dtensors_to_chunk(unit: FeaturedUnit, dtensors: list[DTensor]) -> Tensor:
    """Go back: this rank's chunk ``[n]`` of what is divided as :func:`chunk_to_dtensors` does."""
    rows = _rows(unit, everywhere=False)
    own = [tensor._local_tensor.reshape(-1) for tensor in dtensors]
    own = [t[: len(piece)] for t, piece in zip(own, rows[unit.shard_rank], strict=True)]
    (chunk,) = _redistributed(unit, own, rows, _chunks(unit))
    return chunk


def _redistributed(
    unit: FeaturedUnit, own: list[Tensor], have: Sequence[Pieces], want: Sequence[Pieces]
) -> list[Tensor]:
    # With offload the shards are on the host, where NCCL cannot send from.
    sent = [tensor.to(unit.device) for tensor in own]
    label = f"the exchange of a tensor of unit {unit.label} for a checkpoint"
    found = redistribute(sent, have, want, unit.shard_group, label)
    return [tensor.to(own[0].device) for tensor in found]


def _chunks(unit: FeaturedUnit) -> list[Pieces]:
    """Of each rank, the part of the flat parameter that is its chunk."""
    size = unit.layout.padded_numel // unit.shard_world_size
    starts = [min(rank * size, unit.numel) for rank in range(unit.shard_world_size + 1)]
    return [[range(*both)] for both in pairwise(starts)]


def _rows(unit: FeaturedUnit, everywhere: bool = True) -> list[Pieces]:
    """Of each rank, the parts of the flat parameter that are its rows, for each parameter.

    Args:
        everywhere: what has no rows is on each rank; else on the first one only.
    """
    found: list[list[range]] = [[] for _ in range(unit.shard_world_size)]
    start = 0
    for info in unit.param_infos:
        for rank, pieces in enumerate(found):
            first, last = 0, int(everywhere or rank == 0)
            if info.shape:
                block = block_numel(info.shape, unit.shard_world_size)
                first = min(rank * block, info.shape.numel())
                last = min(first + block, info.shape.numel())
            pieces.append(range(start + first, start + last))
        start += info.shape.numel()
    return [*found]


class Form(Protocol):
    """How DTensors are made of chunks, and chunks of DTensors.

    ``name`` is that of an entry in an optimizer's state, or empty for the parameters themselves.

    Attributes:
        copies: whether state dicts have copies of what the model has.
    """

    copies: bool

    def split(self, unit: FeaturedUnit, chunk: Tensor, name: str) -> list[DTensor]:
        """For each parameter of the unit a DTensor of its shape."""

    def join(self, unit: FeaturedUnit, dtensors: list[DTensor], name: str) -> Tensor:
        """Go back: this rank's chunk ``[n]``."""


class Exchanged:
    """DTensors with values: ranks exchange what they have."""

    copies = True

    def split(self, unit: FeaturedUnit, chunk: Tensor, name: str) -> list[DTensor]:
        return chunk_to_dtensors(unit, chunk)

    def join(self, unit: FeaturedUnit, dtensors: list[DTensor], name: str) -> Tensor:
        return dtensors_to_chunk(unit, dtensors)


EXCHANGED = Exchanged()


class UnitDTensors:
    """The parameters of one unit as DTensors, while they are summoned (full_params.py).

    Args:
        form: what makes them, of a unit in chunks.

    Attributes:
        params: one for each of ``unit.param_infos``. In rows these are what the optimizer has. Of
            a unit in chunks they are copies.
    """

    def __init__(self, unit: FeaturedUnit, form: Form) -> None:
        self.unit, self.form = unit, form
        self.params: list[Any] = unit.optimized_params
        if unit.mesh is None:
            made = form.split(unit, unit.sharded_flat_param, "") if unit.param_infos else []
            self.params = [nn.Parameter(d, requires_grad=unit.trained[0]) for d in made]

    def register(self) -> None:
        """Register them in the modules, under their names."""
        self.unit.shows_views = True  # for hide_views, which puts them away again
        self.unit.module._parameters.pop(FLAT_PARAM, None)
        for info, param in zip(self.unit.param_infos, self.params, strict=True):
            for module, attribute in info.owners:
                setattr(module, attribute, param)

    def unregister(self) -> None:
        """Put back what the modules had."""
        if self.unit.mesh is None:  # in rows they are the model's own
            end_of_full_params(self.unit, self.params)
        hide_views(self.unit)

    def check_shapes(self) -> None:
        """Check that all can be written back.

        Raises:
            ValueError: one was removed, or replaced by what is not divided in the same way.
        """
        for info, param in zip(self.unit.param_infos, self.params, strict=True):
            for module, attribute in info.owners:
                found: Any = module._parameters.get(attribute)
                if not divided_alike(found, param):
                    raise ValueError(
                        f"parameter {info.name!r} of unit {self.unit.label} was replaced inside "
                        f"as_dtensors by {_in_words(found)}; it has to stay {_in_words(param)}."
                    )

    def write_back(self) -> bool:
        """Copy the values to the unit's shard.

        Returns:
            Whether a shard in chunks was changed. False for a unit in rows.
        """
        for info, param in zip(self.unit.param_infos, self.params, strict=True):
            for module, attribute in info.owners:
                found: Any = module._parameters[attribute]
                if found is not param:  # load_state_dict(assign=True) has put it there
                    param._local_tensor.copy_(found._local_tensor)
        if self.unit.mesh is None and self.params:
            chunk = self.form.join(self.unit, self.params, "")
            own = self.unit.padded_shard[: chunk.numel()]
            if not torch.equal(chunk, own):  # or a backward that is still to come would be refused
                own.copy_(chunk)
                return True
        return False


def divide_alike(value: Tensor, param: DTensor) -> DTensor:
    """``value``, whole or divided in any way, as a DTensor that is divided as ``param`` is.

    Args:
        value: of the shape of ``param``. If it is a DTensor that is divided in another way, its
            ranks gather it.
    """
    if divided_alike(value, param):
        return value  # type: ignore[return-value]
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if not param.is_meta:  # else torch would copy nothing, and warn of it where there are values
        whole = whole.to(param.device)
    whole = whole.detach()
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    own = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
    return like(param, whole[own])


def detached(value: Tensor, to_cpu: bool) -> Tensor:
    """A copy without a graph; of a DTensor, a copy of this rank's part.

    Args:
        to_cpu: in the host's memory.
    """
    local = local_of(value).detach()
    copy = local.to("cpu" if to_cpu else local.device, copy=True)
    return like(value, copy) if isinstance(value, DTensor) else copy


def _in_words(param: Any) -> str:
    if not isinstance(param, DTensor):
        return "nothing" if param is None else f"a {type(param).__name__} of {list(param.shape)}"
    return f"a DTensor of {list(param.shape)} with {param.placements} on {param.device_mesh}"

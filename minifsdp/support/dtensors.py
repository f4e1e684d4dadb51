"""DTensors of which each rank has a block of rows, made from what this rank has.

``torch.distributed.tensor.DTensor.from_local`` makes the same after checks that take longer than
all the rest, and they would be made for each gradient in each step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def dtensor(unit: Any, mesh: DeviceMesh, shape: torch.Size, local: Tensor, dim: int = 0) -> DTensor:
    """A DTensor that is divided in rows among the ranks of a unit.

    Args:
        mesh: of these ranks; its dimensions are those of comm.groups.mesh_of.
        shape: of the whole. One without a dimension has no rows, and is whole on each rank.
        local: what this rank has of it.
        dim: along which it is divided.
    """
    groups = [group for group in (unit.replicate_group, unit.shard_group) if group is not None]
    rows = [group is unit.shard_group and len(shape) > 0 for group in groups]
    placements = tuple(Shard(dim) if divided else Replicate() for divided in rows)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    return distributed(local, DTensorSpec(mesh, placements, meta))


def like(param: DTensor, local: Tensor) -> DTensor:
    """A DTensor of which ``local`` is this rank's part, distributed as ``param`` is."""
    return distributed(local, param._spec)


def distributed(local: Tensor, spec: DTensorSpec) -> DTensor:
    """As :func:`like`, distributed as ``spec`` says; its dtype is that of ``local``."""
    meta: Any = spec.tensor_meta
    if local.dtype is not meta.dtype:
        meta = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: all of it if the tensor is a plain one."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def divided_alike(found: object, param: DTensor) -> bool:
    """Whether ``found`` is a DTensor of the same shape, of which each rank has the same part."""
    return isinstance(found, DTensor) and (
        (found.shape, found.placements, found.device_mesh)
        == (param.shape, param.placements, param.device_mesh)
    )


def standalone(local: Tensor) -> Tensor:
    """The same memory as a storage of its own, for what this rank has of a DTensor.

    The rows of a parameter are a part of the shard of their unit. torch copies and saves whole
    storages: for a view of the shard it would write the whole shard to a file. And if the local
    tensor of a DTensor does not begin where its storage begins, ``copy.deepcopy``, ``torch.save``
    and ``async_save`` (2.13) take the DTensor for one with memory of its own, and fail.
    """
    if local.is_meta:  # it has no memory
        return local
    begins, size = local.storage_offset() * local.itemsize, local.numel() * local.itemsize
    storage = local.untyped_storage()[begins : begins + size]  # it keeps all of the memory alive
    return local.new_empty(0).set_(storage, 0, local.shape, local.stride())

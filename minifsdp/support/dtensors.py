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


def dtensor(unit: Any, mesh: DeviceMesh, shape: torch.Size, local: Tensor) -> DTensor:
    """A DTensor that is divided in rows among the ranks of a unit.

    Args:
        mesh: of these ranks; its dimensions are those of comm.groups.mesh_of.
        shape: of the whole. One without a dimension has no rows, and is whole on each rank.
        local: what this rank has of it.
    """
    groups = [group for group in (unit.replicate_group, unit.shard_group) if group is not None]
    rows = [group is unit.shard_group and len(shape) > 0 for group in groups]
    placements = tuple(Shard(0) if divided else Replicate() for divided in rows)
    stride = torch.empty(shape, device="meta").stride()
    return _dtensor(local, DTensorSpec(mesh, placements, TensorMeta(shape, stride, local.dtype)))


def like(param: DTensor, local: Tensor) -> DTensor:
    """A DTensor of which ``local`` is this rank's part, distributed as ``param`` is."""
    spec = param._spec
    if local.dtype is not param.dtype:
        meta = TensorMeta(spec.shape, spec.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    return _dtensor(local, spec)


def _dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]

"""Tensor parallelism inside of units in rows: parameters that are DTensors on another mesh already.

``parallelize_module(model, mesh["tp"], plan)`` divides a weight among the ranks of ``mesh["tp"]``.
``fully_shard(block, mesh=mesh["dp"])`` divides what each of these ranks has once more, among the
ranks of ``mesh["dp"]``. Of a weight [8, 6] that ``ColwiseParallel`` has cut, on 2 x 2 ranks::

    a unit divides           [4, 6]   this rank's part, a plain tensor
    its modules compute with [8, 6]   DTensor on ("tp",), Shard(0); local tensor [4, 6]
    an optimizer sees        [8, 6]   DTensor on ("dp", "tp"), (_StridedShard(0, split_factor=2),
                                      Shard(0)); local tensor [2, 6]

``_StridedShard`` says that "tp" has cut these rows first, although "dp" comes first in the mesh. So
the rank (dp=0, tp=1) has the first half of the second half, which are rows 4 and 5.

The layers communicate on ``mesh["tp"]`` by themselves; the engine knows nothing of it. The
gradient of a parameter may be distributed in another way than the parameter is: where each rank of
"tp" runs a norm on a part of the sequence, each has a summand of the norm's gradient. It is
redistributed before the unit takes it, in each backward. (torch does that once for all backwards of
an accumulation, which adds the same numbers in a different order.)

With ``dp_mesh_dims`` parameters are DTensors of the whole mesh from the beginning, with
``Replicate()`` on its dimensions for data; and so are the inputs. Then the modules compute with
DTensors of the whole mesh, an optimizer sees such DTensors, too, and on the dimensions for data a
gradient may be a summand. The unit adds these up::

    fully_shard(block, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    its modules compute with [8, 6]   DTensor on ("dp", "tp"), (Replicate(), Shard(0))
    an optimizer sees        [8, 6]   as above

A hook of a program on such a parameter (``register_hook``) gets this rank's part of its gradient.

Sources: ``torch.distributed.fsdp.fully_shard`` (pytorch 2.13), which gives these placements;
Shoeybi et al., "Megatron-LM", arXiv:1909.08053; Liang et al., "TorchTitan", arXiv:2410.06511.
"""

import math
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from minifsdp.support.dtensors import distributed


def data_mesh(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh | None:
    """The part of ``mesh`` that units are divided over: all of it, if ``dims`` is None. Several
    dimensions to shard over are one in it, and so are several of replicas.

    Args:
        dims: ``DataParallelMeshDims``, of minifsdp or of torch.

    Raises:
        ValueError: no dimension has that name, or several of one kind are not side by side.
        NotImplementedError: there is no dimension to shard over.
    """
    if dims is None:
        return mesh
    if not dims.shard:
        raise NotImplementedError(
            f"minifsdp: dp_mesh_dims={dims}, replicas alone, is not there yet. Give the mesh one "
            f"more dimension, of size 1, and shard over that."
        )
    known, found = (mesh and mesh.mesh_dim_names) or (), []
    for given in filter(None, (dims.replicate, dims.shard)):
        names = (given,) if isinstance(given, str) else tuple(given)
        for name in names:
            if name not in known:
                raise ValueError(f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {known}")
        if names != known[(first := known.index(names[0])) : first + len(names)]:
            raise ValueError(f"{names} are to be one dimension, and not side by side in {known}")
        assert mesh is not None
        found.append(mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names)))
    return found[0] if len(found) == 1 else DeviceMesh._concatenate(found)


def check_on_mesh(name: str, param: Any, mesh: DeviceMesh, data: DeviceMesh) -> None:
    """Refuse a parameter that is not on all of ``mesh``, or is divided over its part ``data``.

    Raises:
        ValueError: naming it.
    """
    found = f"{param.placements} on {param.device_mesh}" if isinstance(param, DTensor) else "plain"
    if not isinstance(param, DTensor) or param.device_mesh != mesh:
        raise ValueError(
            f"When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
            f"{mesh}, as distribute_module makes them; parameter {name!r} is {found}."
        )
    for at in chain(*data_dims(mesh, data)):
        if not param.placements[at].is_replicate():
            raise ValueError(
                f"Expected Replicate() on DP dim {mesh.mesh_dim_names[at]!r} (index {at}) of "  # type: ignore[index]
                f"parameter {name!r}, which is {found}: fully_shard divides it there."
            )


def data_dims(mesh: DeviceMesh, data: DeviceMesh) -> list[list[int]]:
    """For each dimension of ``data`` the numbers of those of ``mesh`` that it is made of, as a rule
    one; empty if the two are different parts of a larger mesh."""
    names = list(mesh.mesh_dim_names or ())
    return [
        [names.index(name)] if name in names else [*range(start, end)]
        for name in data.mesh_dim_names or ()
        for start, end in combinations(range(len(names) + 1), 2)
        if "_".join(names[start:end]) == name
    ]


def check_meshes(name: str, param: DTensor, mesh: DeviceMesh | None) -> None:
    """Refuse a parameter that is a DTensor, unless FSDP can divide what each rank has of it.

    Args:
        name: of the parameter.
        mesh: of the ranks that are to divide it further.

    Raises:
        ValueError: there is no such mesh; or the two are not different dimensions of one mesh; or
            the parameter is a sum that is still to be added up.
    """
    found = f"parameter {name!r} is a DTensor with {param.placements} on {param.device_mesh}"
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(f"{found}, of which each rank has a summand. Add them up before.")
    try:
        mesh is not None and DeviceMesh._concatenate([mesh, param.device_mesh])
    except (RuntimeError, ValueError):
        mesh, found = None, f"{found}, and mesh={mesh}"
    if mesh is None:
        raise ValueError(
            f"{found}. What is distributed already is divided further by fully_shard(module, "
            f'mesh=...), over other dimensions of the same mesh: mesh = init_device_mesh("cuda", '
            f'(2, 4), mesh_dim_names=("dp", "tp")), then parallelize_module(model, mesh["tp"], '
            f'plan), then fully_shard(block, mesh=mesh["dp"]) for each block and for the model.'
        )


def on_both_meshes(divided: DTensor, spec: DTensorSpec) -> DTensor:
    """What the optimizer sees of a parameter.

    Args:
        divided: this rank's rows of the part that it has by ``spec``, on the mesh of its unit.
        spec: how the parameter is distributed on a mesh of its own.
    """
    mesh, placements = spec.mesh, [*spec.placements]
    own = data_dims(mesh, divided.device_mesh)
    if not own:
        mesh = DeviceMesh._concatenate([divided.device_mesh, mesh])
        own = [[at] for at in range(divided.device_mesh.ndim)]
        placements = [*divided.placements, *placements]
    for (at, *_), rows in zip(own, divided.placements, strict=True):
        placements[at] = rows
        if isinstance(rows, Shard):
            cut = [j for j in range(at + 1, mesh.ndim) if _cuts(placements[j], rows.dim)]
            parts = math.prod(mesh.size(j) for j in cut)  # of that dimension, which come first
            if parts > 1:
                placements[at] = _StridedShard(rows.dim, split_factor=parts)
    if len(own[-1]) > 1:
        mesh, placements = _as_one(mesh, placements, own, divided.device_mesh)
    both = DTensorSpec(mesh, tuple(placements), spec.tensor_meta)
    return distributed(divided._local_tensor, both)


def _as_one(
    mesh: DeviceMesh, placements: Sequence[Any], own: Sequence[Sequence[int]], data: DeviceMesh
) -> tuple[DeviceMesh, list[Any]]:
    """``mesh`` with ``data`` in the place of the dimensions that it is made of."""
    meshes, shown = [], []
    for at, name in enumerate(mesh.mesh_dim_names or ()):
        if at == own[-1][0]:
            meshes.append(data)
            shown += [placements[dims[0]] for dims in own]
        elif at not in chain(*own):
            meshes.append(mesh[name])
            shown.append(placements[at])
    return DeviceMesh._concatenate(meshes), shown


def _cuts(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


class TensorParallelViews:
    """A ``view_maker``: the views of another one, as DTensors where the parameters were DTensors.

    Args:
        inner: the other ``view_maker``.
        specs: of each parameter of the unit; None for a plain one.
    """

    def __init__(self, inner: Any, specs: Sequence[DTensorSpec | None]) -> None:
        self._inner, self._specs = inner, specs
        self.has_gradient, self.take_gradient = inner.has_gradient, inner.take_gradient
        self.drop_gradient = inner.drop_gradient

    def make(self, unit: Any) -> list[Tensor]:
        """See :class:`~minifsdp.core.views.SplitViews`."""
        views = zip(self._inner.make(unit), self._specs, strict=True)
        return [view if spec is None else _on_mesh(view, spec, unit.mesh) for view, spec in views]


class _OnMesh(torch.autograd.Function):
    """From this rank's part of a parameter to the parameter, and from its gradient to this rank's
    part. (With ``DTensor.from_local`` that part may still be on its way, and collectives of our own
    would read it before it is there.)"""

    @staticmethod
    def forward(ctx: Any, view: Tensor, spec: DTensorSpec, data: DeviceMesh) -> Tensor:
        ctx.spec, ctx.data = spec, data
        return distributed(view.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        placements = list(ctx.spec.placements)
        for at in chain(*data_dims(ctx.spec.mesh, ctx.data)):
            # There a gradient may be a summand. The unit adds them up.
            placements[at] = grad.placements[at]
        local = grad.redistribute(ctx.spec.mesh, placements).to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local, None, None


_on_mesh: Any = _OnMesh.apply

"""``shard_placement_fn``: parameters that are not divided along their first dimension.

::

    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)

    weight [2, 4]   a a b b     2 ranks      rank 0: a a     DTensor [2, 4], Shard(1)
                    c c d d                          c c     local tensor [2, 2]

``Shard(1)`` gives each rank whole columns. An optimizer may need these, and some checkpoints are
divided in this way.

The unsharded flat parameter stays what it is, whole parameters row by row. So nothing that computes
with parameters, or looks at them, knows of this. Only the blocks of a rank are in different places:
of a parameter [2, 4] the rank has a piece of each row (``Columns`` of comm/blocks.py).

Source: ``torch.distributed.fsdp.fully_shard`` (pytorch 2.13), whose argument this is. As there, the
ranks have to divide the dimension evenly, or it is refused.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from minifsdp.wrapping.auto_wrap import make_param_infos


def divided_dims(
    module: nn.Module, choose: Any, ranks: int, mesh: DeviceMesh | None
) -> dict[str, int]:
    """The dimensions along which the parameters of a unit are divided, by name.

    Args:
        module: of the unit, which is still to be made.
        choose: is called with each parameter, and returns ``Shard(dim)``, or None for the first
            dimension; or one of these in torch's ``ShardPlacementResult``, with ``mesh``. None: the
            first dimension for all.
        ranks: how many share the unit.
        mesh: as it was given to ``fully_shard``.

    Raises:
        ValueError: ``choose`` returns something else, or a dimension that the parameter lacks.
        NotImplementedError: the ranks do not divide the dimension evenly; or ``choose`` returns a
            different mesh, for a parameter that other ranks are to share.
    """
    dims: dict[str, int] = {}
    for info in make_param_infos(module) if choose else ():
        found = choose(info.owners[0].get())
        if hasattr(found, "mesh_info"):
            if mesh is None or getattr(found.mesh_info, "mesh", None) != mesh:
                raise NotImplementedError(
                    f"minifsdp: a ShardPlacementResult from shard_placement_fn, for {info.name!r}, "
                    f"is not there yet, unless it has the mesh that was given to fully_shard. "
                    f"Return Shard(dim); and for what other ranks are to share call "
                    f"fully_shard(inner_module, mesh=their_mesh) before."
                )
            found = found.placement
        if found is not None and not isinstance(found, Shard):
            raise ValueError(
                f"Invalid shard_placement_fn result: {found!r} for parameter {info.name!r}; it has "
                f"to return Shard(dim), or None for the first dimension."
            )
        dim = 0 if found is None else found.dim
        if not -len(info.shape) <= dim < max(len(info.shape), 1):
            raise ValueError(
                f"shard_placement_fn returns {found!r} for parameter {info.name!r}, which has the "
                f"shape {list(info.shape)}."
            )
        dims[info.name] = dim = dim + len(info.shape) if dim < 0 else dim
        if dim and info.shape[dim] % ranks:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: parameter {info.name!r} has "
                f"the shape {list(info.shape)}, and {ranks} ranks share it. Divide another "
                f"dimension; the first one may be uneven."
            )
    return dims

"""The arguments of ``fully_shard``, in the words of ``FullyShardedDataParallel``.

::

    fully_shard(module, mesh=mesh, ...)          Settings(device_mesh=mesh, ...)
    reshard_after_forward=True, 1-D mesh         FULL_SHARD
    reshard_after_forward=False, 1-D mesh        SHARD_GRAD_OP
    the same with (replicate, shard)             HYBRID_SHARD, _HYBRID_SHARD_ZERO2
    MixedPrecisionPolicy(bf16, fp32)             MixedPrecision(bf16, fp32)
    CPUOffloadPolicy()                           CPUOffload(True)
    a mesh of "cuda"                             device_id="cuda", the current one

A number for ``reshard_after_forward`` says how many ranks share the parameters between forward and
backward. The number of all ranks that share the unit means True, and 1 means False: each rank keeps
all parameters. Any other number means True, with a smaller group (post_forward.py).

Source: ``torch.distributed.fsdp.fully_shard`` (pytorch 2.13), ``_get_post_forward_mesh_info``.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from minifsdp.api import CPUOffload, MixedPrecision
from minifsdp.core.api import ShardingStrategy
from minifsdp.core.collectives import Group
from minifsdp.wrapping.build import default_device
from minifsdp.wrapping.settings import Settings

_STRATEGIES = {  # by whether to reshard after forward, and by the dimensions of the mesh
    (True, 1): ShardingStrategy.FULL_SHARD,
    (False, 1): ShardingStrategy.SHARD_GRAD_OP,
    (True, 2): ShardingStrategy.HYBRID_SHARD,
    (False, 2): ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def fsdp2_settings(
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> Settings:
    """The settings of one unit.

    Raises:
        ValueError: ``reshard_after_forward`` is a number that does not divide the ranks; or as
            :class:`Settings` does.
    """
    reshards = reshards_after_forward(reshard_after_forward, mesh)
    casts = mp_policy.cast_forward_inputs and mp_policy.param_dtype is not None
    dimensions = 2 if mesh is not None and mesh.ndim > 1 else 1
    return Settings(
        sharding_strategy=_STRATEGIES[reshards, dimensions],
        cpu_offload=CPUOffload(isinstance(offload_policy, CPUOffloadPolicy)),
        mixed_precision=MixedPrecision(
            mp_policy.param_dtype, mp_policy.reduce_dtype,
            cast_forward_inputs=casts, cast_root_forward_inputs=casts,
        ),
        device_id=device_of(mesh),
        device_mesh=mesh,
        use_orig_params=True,
    )  # fmt: skip


def device_of(mesh: DeviceMesh | None) -> torch.device | str | None:
    """Where a unit is moved to, as by torch: to the device of its mesh.

    Without a mesh, to the GPU if collectives run there. With gloo, which takes tensors from
    everywhere, the unit is not moved.
    """
    if mesh is not None:
        return mesh.device_type
    group = dist.group.WORLD  # None: there is no group, which place() refuses later
    device = None if group is None else default_device(group)
    return device if device is not None and device.type == "cuda" else None


def reshards_after_forward(given: bool | int | None, mesh: DeviceMesh | None) -> bool:
    """Whether to free the parameters between forward and backward.

    Args:
        given: None is True. For a number, see the top of this file.
        mesh: its last dimension has the ranks that share the unit; None: all ranks.

    Raises:
        ValueError: as :func:`fsdp2_settings` does.
    """
    if given is None or isinstance(given, bool):
        return given is not False
    ranks = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    if not isinstance(given, int) or given < 1 or ranks % given:
        raise ValueError(
            f"reshard_after_forward={given!r}: expected True, False or a number that divides the "
            f"{ranks} ranks that share the unit."
        )
    if given not in (1, ranks) and mesh is not None and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"reshard_after_forward={given} makes process groups, which all "
            f"{dist.get_world_size()} ranks have to do together, and the mesh has {mesh.size()} of "
            f"them. Use a mesh of all ranks, or True or False."
        )
    return given != 1 or ranks == 1


def post_forward_lines(
    given: bool | int | None, shard_group: Group | None, mesh: DeviceMesh | None
) -> tuple[tuple[int, ...], ...] | None:
    """The smaller groups that share the parameters between forward and backward, as global ranks;
    None: the same ranks as otherwise.

    Args:
        given: as :func:`reshards_after_forward` has checked it.
        mesh: of all ranks; its last dimension has those of ``shard_group``.
    """
    if given is None or shard_group is None or given in (True, False, shard_group.size()):
        return None  # 1 is True here
    ranks = torch.arange(dist.get_world_size(), device="cpu") if mesh is None else mesh.mesh
    return tuple(map(tuple, ranks.view(-1, given).tolist()))

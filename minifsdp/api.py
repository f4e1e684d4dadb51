"""What users write for features beside the core: records, without behaviour.

Names and meanings are those of ``torch.distributed.fsdp``, as in core/api.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class CPUOffload:
    """Whether the shards are stored in the host's memory; see offload.py."""

    offload_params: bool = False
    """Parameters, gradients and optimizer state are on the CPU, and the optimizer steps there. A
    shard is copied to the device before each all-gather, and its gradient back after each
    reduction."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes to compute and to communicate in; see precision.py. None is the parameters'."""

    param_dtype: torch.dtype | None = None
    """Of the unsharded parameters, and so of the computation and of its gradients. The shards,
    which the optimizer steps, keep the original dtype."""

    reduce_dtype: torch.dtype | None = None
    """Of gradients while they are reduced over ranks. None: ``param_dtype``."""

    buffer_dtype: torch.dtype | None = None
    """Of floating-point buffers. Integer buffers keep their dtype."""

    keep_low_precision_grads: bool = False
    """The optimizer gets gradients in ``param_dtype``, and not in the shards' dtype."""

    cast_forward_inputs: bool = False
    """Cast the floating-point inputs of this unit's module to ``param_dtype``. If that is None, the
    unit computes in full precision: its inputs are cast to the shards' dtype, and its outputs back
    to the dtype of the inputs."""

    cast_root_forward_inputs: bool = True
    """The same for the inputs of the root, if there is a ``param_dtype``."""

    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    """With ``auto_wrap_policy``, modules of these classes become units that compute in full
    precision: 8 bits of mantissa are not enough for running statistics."""

    full_precision_in_eval: bool = False
    """Compute in the shards' dtype while the root is in ``eval()``. With the environment variable
    FSDP_USE_FULL_PREC_IN_EVAL=1 each wrapper that is built later does this, as in PyTorch."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh are for data, of ``fully_shard(..., dp_mesh_dims=...)``.

    Attributes:
        shard: the name of the dimension to shard over; or the names of several side by side, which
            count as one.
        replicate: the same for the dimensions with replicas, for hybrid sharding.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

"""What users write: enums and records, without behaviour.

Names and meanings are those of ``torch.distributed.fsdp``, so a program changes from one to the
other by its imports. The file of each concept describes what the settings do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """What each rank stores, and when. The stages are those of ZeRO, arXiv:1910.02054."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state are sharded. A unit's parameters are unsharded for
    its forward, resharded after it, and unsharded again for its backward (ZeRO stage 3)."""

    SHARD_GRAD_OP = auto()
    """As FULL_SHARD, but parameters stay unsharded from the forward to the backward. This saves one
    all-gather for each unit and step, and costs the memory of the whole model (ZeRO stage 2)."""

    NO_SHARD = auto()
    """Nothing is sharded. Gradients are all-reduced, as in DistributedDataParallel."""

    HYBRID_SHARD = auto()
    """FULL_SHARD inside a group of ranks, such as one host, and replicated across the groups.
    All-gathers stay inside a group; across groups, only shards of gradients are all-reduced."""

    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, and replicated across the groups."""


class BackwardPrefetch(Enum):
    """When the next unit's all-gather starts during the backward; see prefetch.py."""

    BACKWARD_PRE = auto()
    """Before the backward of the current unit. This overlaps most, and needs the memory of two
    unsharded units."""

    BACKWARD_POST = auto()
    """After the current unit has been resharded. This overlaps less, and needs less memory."""


class ForwardPrefetch(Enum):
    """When the next unit's all-gather starts during the forward; see prefetch.py."""

    FORWARD_PRE = auto()
    """Before the forward of the current unit, by the recorded pre-forward order (fairscale PR
    972)."""

    FORWARD_POST = auto()
    """After the current unit has been resharded, by the recorded post-forward order (fairscale PR
    1052)."""


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


@dataclass
class Stats:
    """What one root has done on this rank since it was built.

    Units that are never sharded (NO_SHARD) do not count.
    """

    all_gathers: int = 0
    """Times that a unit was unsharded."""
    reductions: int = 0
    """Gradients whose reduction was started."""
    declined_prefetches: int = 0
    """Prefetches that the limiter did not admit."""
    unsharded_units: int = 0
    """Units that are unsharded now."""
    unsharded_bytes: int = 0
    """Bytes of their unsharded flat parameters, padding included."""
    peak_unsharded_units: int = 0
    """The most units that were unsharded at one time."""
    peak_unsharded_bytes: int = 0
    """The most bytes that they had at one time."""

    def count_unshard(self, nbytes: int) -> None:
        """A unit of so many bytes is being gathered."""
        self.all_gathers += 1
        self.unsharded_units += 1
        self.unsharded_bytes += nbytes
        if self.unsharded_units > self.peak_unsharded_units:
            self.peak_unsharded_units = self.unsharded_units
        if self.unsharded_bytes > self.peak_unsharded_bytes:
            self.peak_unsharded_bytes = self.unsharded_bytes

    def count_reshard(self, nbytes: int) -> None:
        """A unit of so many bytes has been freed."""
        self.unsharded_units -= 1
        self.unsharded_bytes -= nbytes

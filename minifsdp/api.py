"""The words a user says: enums and plain records, no behaviour.

Names and meanings are those of ``torch.distributed.fsdp``, so that code moves between the two by
changing one import. What each word *does* is told in the file of its concept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """What a unit keeps whole, and when (the stages are those of ZeRO, arXiv:1910.02054)."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state are sharded; parameters are gathered for the
    forward, freed after it, gathered again for the backward (ZeRO stage 3)."""

    SHARD_GRAD_OP = auto()
    """As FULL_SHARD, but parameters stay gathered from the forward to the backward: one all-gather
    fewer for each unit and step, and the whole model unsharded in between (ZeRO stage 2)."""

    NO_SHARD = auto()
    """Nothing is sharded; gradients are all-reduced, as DistributedDataParallel does."""

    HYBRID_SHARD = auto()
    """FULL_SHARD inside a group of ranks (those of one host, say, with a fast network), replicated
    across groups: gathers stay inside, only chunks of gradients travel between."""

    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, replicated across groups."""


class BackwardPrefetch(Enum):
    """When, during the backward, the next unit's all-gather is issued; see prefetch.py."""

    BACKWARD_PRE = auto()
    """Before the current unit's backward: most overlap, two units' parameters alive."""

    BACKWARD_POST = auto()
    """After the current unit's parameters are freed: less overlap, less memory."""


class ForwardPrefetch(Enum):
    """When, during the forward, the next unit's all-gather is issued; see prefetch.py."""

    FORWARD_PRE = auto()
    """Before the current unit's forward, by the recorded pre-forward order (fairscale PR 972)."""

    FORWARD_POST = auto()
    """After the current unit is freed, by the recorded post-forward order (fairscale PR 1052)."""


@dataclass(frozen=True)
class CPUOffload:
    """Where parameters, gradients and optimizer state live between uses; see offload.py."""

    offload_params: bool = False
    """In the host's memory; so the optimizer steps there. Gathers upload, reductions download."""


@dataclass(frozen=True)
class MixedPrecision:
    """Which dtypes are computed and sent with; see precision.py. None: that of the parameters."""

    param_dtype: torch.dtype | None = None
    """Of the gathered parameters, and so of the computation and of its gradients. The shards, which
    the optimizer steps, keep theirs."""

    reduce_dtype: torch.dtype | None = None
    """Of gradients while they are added up over ranks. None: ``param_dtype``."""

    buffer_dtype: torch.dtype | None = None
    """Of floating-point buffers. Integer buffers are left alone."""

    keep_low_precision_grads: bool = False
    """Leave gradients in ``param_dtype`` for the optimizer, instead of the shards' dtype."""

    cast_forward_inputs: bool = False
    """Cast the floating-point inputs of this unit's module to ``param_dtype``. Where that is None,
    the unit computes in full precision: its inputs are cast to the shards' dtype, and its outputs
    back to the one that the inputs had."""

    cast_root_forward_inputs: bool = True
    """The same, for the inputs of the root."""

    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)
    """Modules that become units in full precision, in every model that is auto-wrapped: running
    statistics do not survive in 8 bits of mantissa."""

    full_precision_in_eval: bool = False
    """Compute in the shards' dtype while the root is in ``eval()``. The environment variable
    FSDP_USE_FULL_PREC_IN_EVAL=1 asks for this in every wrapper built from then on, as in torch."""


@dataclass
class Stats:
    """What one root has done on this rank since it was built. Bytes are of full parameters; units
    that are never sharded (NO_SHARD) do not count."""

    all_gathers: int = 0
    reductions: int = 0
    declined_prefetches: int = 0
    """Prefetches that the limiter did not admit."""
    unsharded_units: int = 0
    unsharded_bytes: int = 0
    peak_unsharded_units: int = 0
    peak_unsharded_bytes: int = 0

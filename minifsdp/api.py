"""The words a user says: enums and plain records, no behaviour.

Names and meanings are those of ``torch.distributed.fsdp``, so that code moves between the two by
changing one import. What each word *does* is told in the file of its concept.
"""

from dataclasses import dataclass
from enum import Enum, auto


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
    """FULL_SHARD inside a group of ranks, replicated across groups. Not implemented yet."""

    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, replicated across groups. Not implemented yet."""


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

"""What users write: the enums among the arguments.

Names and meanings are those of ``torch.distributed.fsdp``, so a program changes from one to the
other by its imports. The file of each concept describes what the settings do.
"""

from enum import Enum, auto


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

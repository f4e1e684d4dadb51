"""Where a unit stands: two small state machines, and every transition of each.

Whether the unsharded flat parameter is there::

    SHARDED --start_unshard--> UNSHARDING --finish_unshard--> UNSHARDED
       ^                           |                              |
       +--------- reshard ---------+----------- reshard ----------+

UNSHARDING goes straight back if the unit was prefetched and never used, or if its gather failed.

How far the unit is in the training step::

    IDLE --run_forward--> FORWARD --start_backward--> PRE_BACKWARD --complete_grad--> POST_BACKWARD
     ^                    |  ^  |                          |                           |
     |                    |  |  +------ complete_grad -----|-------------------------->+
     +-- start_step ------+  +--------- end_backward ------+---------------------------+

A unit without a PRE_BACKWARD is one of which autograd has saved nothing, so that nothing needed its
parameters. At the end of a backward all units are in FORWARD again, because another graph may still
go through them. When the next step starts, or an exception has ended this one, all become IDLE.

The names are those of PyTorch's FSDP2 (``ShardedState`` and ``TrainingState`` in
``torch/distributed/fsdp/_fully_shard/_fsdp_common.py``).
"""

from enum import Enum, auto


class ShardedState(Enum):
    """Whether the unsharded flat parameter has memory and data."""

    SHARDED = auto()
    UNSHARDING = auto()  # the memory is there, the all-gather is under way
    UNSHARDED = auto()


class TrainingState(Enum):
    """How far a unit is in the current step."""

    IDLE = auto()
    FORWARD = auto()  # its forward ran with gradients enabled: a backward may follow
    PRE_BACKWARD = auto()  # its backward has started
    POST_BACKWARD = auto()  # its gradient is complete


class UnitState:
    """The two states of one unit. Read the attributes; change them through the methods only."""

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.training = TrainingState.IDLE
        self.graph_task = -1  # autograd's number of the backward that PRE_BACKWARD belongs to

    def start_unshard(self) -> None:
        """The gather is about to start."""
        assert self.sharded is ShardedState.SHARDED
        self.sharded = ShardedState.UNSHARDING

    def finish_unshard(self) -> None:
        """The computation has waited for the gather."""
        assert self.sharded is ShardedState.UNSHARDING
        self.sharded = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """The unsharded flat parameter has been freed."""
        assert self.sharded is not ShardedState.SHARDED
        self.sharded = ShardedState.SHARDED

    def run_forward(self) -> None:
        """A forward has run with gradients enabled. In a backward it is a recomputation
        (activation checkpointing), which changes nothing."""
        if self.training is not TrainingState.PRE_BACKWARD:
            self.training = TrainingState.FORWARD

    def start_backward(self, graph_task: int) -> None:
        """The first gradient has reached the unit, in the backward with this number."""
        assert self.training is not TrainingState.PRE_BACKWARD
        self.training, self.graph_task = TrainingState.PRE_BACKWARD, graph_task

    def complete_grad(self) -> None:
        """The backward needs the parameters no more."""
        self.training = TrainingState.POST_BACKWARD

    def end_backward(self) -> None:
        """The whole backward is over."""
        if self.training is not TrainingState.IDLE:
            self.training = TrainingState.FORWARD

    def start_step(self) -> None:
        """Another step starts, whatever has become of the last one."""
        self.training = TrainingState.IDLE

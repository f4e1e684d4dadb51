"""Unit state: whether a unit's parameters are there, why they stay, and how far it is in a step.

The sharded state tells whether the unsharded flat parameter has memory and data::

    SHARDED --start_unshard--> UNSHARDING --finish_unshard--> UNSHARDED
       ^                           |                              |
       +--------- reshard ---------+----------- reshard ----------+

A unit goes from UNSHARDING back to SHARDED if it was prefetched and not used, or if its all-gather
failed.

It goes back to SHARDED when no *reason* to stay is left. Whoever needs the unit holds it with a
reason of its own, ``unit.hold(FORWARD)``, and later lets go of that one only,
``unit.let_go(FORWARD)``. Nobody has to know who else may need it::

    FORWARD     its module runs
    BACKWARD    a gradient has reached it, and its own is not complete
    PREFETCH    it was gathered ahead, and its turn has not come
    STRATEGY    from its forward to its backward: the root, and SHARD_GRAD_OP

Those are an engine's own. A feature that keeps units has one more, in its own file: LIST
(support/listed_modules.py), NO_SYNC (no_sync.py), DIVERGED (checks/rank_agreement.py), SUMMON
(between_steps/full_params.py). Two rules: a reason does not gather the unit, it only keeps what is
gathered; and a reason is taken where all ranks are alike, because all of them have to free alike.

The training state tells how far the unit is in the training step::

    IDLE --run_forward--> FORWARD --start_backward--> PRE_BACKWARD --complete_grad--> POST_BACKWARD
     ^                    |  ^  |                          |                           |
     |                    |  |  +------ complete_grad -----|-------------------------->+
     +-- start_step ------+  +--------- end_backward ------+---------------------------+

A unit goes from FORWARD straight to POST_BACKWARD if autograd has saved none of its parameters, so
that its backward does not need them. At the end of a backward all units return to FORWARD, because
another graph may still go through them. All become IDLE when the next step starts, or when an
exception has ended this one.

The names are those of PyTorch's FSDP2 (``ShardedState`` and ``TrainingState`` in
``torch/distributed/fsdp/_fully_shard/_fsdp_common.py``).
"""

from enum import Enum, auto

FORWARD = "its forward"
BACKWARD = "its backward"
PREFETCH = "a prefetch"
STRATEGY = "its strategy"
OF_A_STEP = frozenset((FORWARD, BACKWARD, PREFETCH, STRATEGY))


class Purpose(Enum):
    """What units are gathered for. With ``full_precision_in_eval`` (precision.py) this decides on
    the dtype."""

    TRAIN = auto()  # a forward in train() mode, and its backward
    EVAL = auto()  # the same in eval() mode
    LOOK = auto()  # a program reads or changes parameters between steps


class ShardedState(Enum):
    """Whether the unsharded flat parameter has memory and data."""

    SHARDED = auto()  # neither
    UNSHARDING = auto()  # memory; the all-gather is in progress
    UNSHARDED = auto()  # both


class TrainingState(Enum):
    """How far a unit is in the current step."""

    IDLE = auto()
    FORWARD = auto()  # its forward ran with gradients enabled: a backward may follow
    PRE_BACKWARD = auto()  # its backward has started
    POST_BACKWARD = auto()  # its gradient is complete


class UnitState:
    """The two states of one unit. Read the attributes, and change them by the methods only.

    Attributes:
        sharded: of the unsharded flat parameter.
        training: in the current step.
        graph_task: autograd's number of the backward in which the unit became PRE_BACKWARD; -1
            before the first one.
    """

    def __init__(self) -> None:
        self.sharded = ShardedState.SHARDED
        self.training = TrainingState.IDLE
        self.graph_task = -1

    def start_unshard(self) -> None:
        """The all-gather is about to start."""
        assert self.sharded is ShardedState.SHARDED
        self.sharded = ShardedState.UNSHARDING

    def finish_unshard(self) -> None:
        """The computation has waited for the all-gather."""
        assert self.sharded is ShardedState.UNSHARDING
        self.sharded = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """The memory of the unsharded flat parameter has been freed."""
        assert self.sharded is not ShardedState.SHARDED
        self.sharded = ShardedState.SHARDED

    def run_forward(self) -> None:
        """A forward has run with gradients enabled. During the unit's backward this is activation
        checkpointing, which runs the forward again, and the state stays the same."""
        if self.training is not TrainingState.PRE_BACKWARD:
            self.training = TrainingState.FORWARD

    def start_backward(self, graph_task: int) -> None:
        """The first gradient has reached the unit, in the backward with this number."""
        assert self.training is not TrainingState.PRE_BACKWARD
        self.training, self.graph_task = TrainingState.PRE_BACKWARD, graph_task

    def complete_grad(self) -> None:
        """The gradient is complete: this backward does not need the parameters any more."""
        self.training = TrainingState.POST_BACKWARD

    def end_backward(self) -> None:
        """The backward of all units is complete; or with several forwards before it, this unit's
        through one of them (support/several_forwards.py)."""
        if self.training is not TrainingState.IDLE:
            self.training = TrainingState.FORWARD

    def start_step(self) -> None:
        """The next step starts, also if an exception has ended this one."""
        self.training = TrainingState.IDLE

"""Unshard: gather the shards of a unit from all ranks.

::

    sharded flat parameter      rank 0: A      rank 1: B      rank 2: C
    unsharded flat parameter    A B C          A B C          A B C       on every rank

There are two functions, because of what can happen between them. :func:`unshard` starts the
all-gather and returns at once; :func:`wait_for_unshard` makes the computation wait for it. The
computation in between hides the time that the network takes.

What a rank sends is a strategy of the unit, its ``source``: as a rule its shard, as it is stored.
How it travels is another one, its ``comm`` (collectives.py).
"""

from torch import Tensor

from .collectives import Group
from .streams import Finish, Streams
from .unit import Unit
from .unit_state import ShardedState


class OwnShard:
    """The source of a unit whose shard is where it is needed, as it is needed. Another source has
    the same methods, and may wrap this one: a cast, or an upload.

    Args:
        group: the ranks that gather; each of them sends a part of the same size. None: there is
            nobody to gather from, since this rank has all of it.
    """

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def prepare(self, unit: Unit, streams: Streams) -> None:
        """The host is about to submit a gather. A source starts the copies here that it needs, on
        their own streams, and lets the unshard stream wait for them. This one needs none."""

    def tensor(self, unit: Unit, streams: Streams) -> Tensor:
        """What is sent, ``[padded_numel / group.size()]``, in the dtype of the unsharded flat
        parameter and on its device. (If there is no group, in any dtype: it is copied, which casts
        as well.) Called once after each :meth:`prepare`, on the stream that reads the tensor."""
        return unit.padded_shard


def unshard(unit: Unit, streams: Streams) -> None:
    """Start to fill ``unit.unsharded.flat_param``, ``[padded_numel]``, on the unshard stream.

    The unit is SHARDED before this, and UNSHARDING after it. Before this, make the unshard stream
    wait for the optimizer's last step. Otherwise the other ranks may get parameters of which some
    are from before that step.
    """
    source = unit.source
    assert unit.unsharded.needs_unshard, unit.label
    unit.state.start_unshard()  # first, so that reshard() frees the memory if what follows fails
    source.prepare(unit, streams)

    def launch() -> Finish:
        # Taken before memory is allocated: if there is none, the source holds no copy any more.
        shard, group = source.tensor(unit, streams), source.group
        # Allocated in here, so that on CUDA the memory belongs to the unshard stream. The
        # all-gather can then write to it without waiting for the compute stream.
        unit.unsharded.allocate()
        full = unit.unsharded.data
        if group is None:
            full.copy_(shard)
            return lambda: None
        finish: Finish = unit.comm.all_gather(unit, full, shard, group)
        return finish

    unit.unshard_event = streams.unshard.submit(launch, f"all-gather {unit.label}")


def wait_for_unshard(unit: Unit) -> None:
    """Make the compute stream wait for the parameters.

    A unit that was UNSHARDING is UNSHARDED after this. Units in other states stay as they are.
    """
    if unit.state.sharded is ShardedState.UNSHARDING:
        assert unit.unshard_event is not None
        # Without this wait the layers would compute with the old contents of that memory.
        unit.unshard_event.wait()
        unit.unshard_event = None
        unit.state.finish_unshard()

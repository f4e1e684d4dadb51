"""The parameters of one root's units: gathered before use, ahead of use, and freed after it.

unshard.py and reshard.py know one unit. Here each of them meets what is shared by all units of a
model: the limit on how many may be unsharded (limiter.py), and the choice of the next one
(prefetch.py).
"""

from .limiter import Limiter
from .prefetch import Prefetcher
from .reshard import reshard
from .streams import Streams
from .unit import Unit
from .unit_state import PREFETCH, ShardedState
from .unshard import unshard
from .views import hide_views


class Parameters:
    """Unshards units and reshards them.

    Args:
        streams: of the device that the units are on.
        limiter: asked before each gather, told of each free.
        prefetcher: asked whether a target is still to be gathered.
    """

    def __init__(self, streams: Streams, limiter: Limiter, prefetcher: Prefetcher) -> None:
        self.streams, self.limiter, self.prefetcher = streams, limiter, prefetcher

    def unshard(self, unit: Unit, reason: str) -> None:
        """Hold a unit that is needed now, and start to gather it, unless a prefetch has done it.
        The host may have to wait for the limiter; for the data it is the computation that waits,
        later."""
        unit.hold(reason)
        unit.reasons.discard(PREFETCH)  # its turn has come
        if unit.state.sharded is ShardedState.SHARDED and unit.unsharded.needs_unshard:
            self.limiter.admit(unit, needed=True)
            self.gather(unit)

    def prefetch(self, target: Unit | None) -> None:
        """Start to gather a unit that will be needed next, if that is so and there is room."""
        if target is None or not target.unsharded.needs_unshard:
            return
        if self.prefetcher.is_sound(target) and self.limiter.admit(target, needed=False):
            target.hold(PREFETCH)
            self.gather(target)

    def gather(self, unit: Unit) -> None:
        """Start to gather a unit that the limiter has admitted."""
        unshard(unit, self.streams)

    def reshard(self, unit: Unit) -> None:
        """Free a unit's parameters: no reason to keep them is left (unit_state.py), or they are of
        another precision or an older step. Does nothing if it is sharded already."""
        if unit.state.sharded is ShardedState.SHARDED:
            hide_views(unit)  # with NO_SHARD there are views, and nothing to free
        else:
            self.limiter.freed(unit, reshard(unit, self.streams))

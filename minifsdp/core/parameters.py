"""The parameters of one root's units: gathered before use, ahead of use, and freed after it.

unshard.py and reshard.py know one unit. Here each of them meets what is shared by all units of a
model: the limit on how many may be unsharded (limiter.py), the choice of the next one
(prefetch.py), and the counts that ``model.engine.stats`` shows.
"""

from typing import Any

from .api import Stats
from .limiter import Limiter
from .prefetch import Prefetcher
from .reshard import reshard
from .streams import Event, Streams
from .unit import Unit
from .unit_state import PREFETCH, ShardedState
from .unshard import unshard
from .views import hide_views


class Parameters:
    """Unshards units and reshards them.

    Args:
        streams: of the device that the units are on; set anew when the model moves.
        limiter: asked before each gather, told of each free.
        prefetcher: told which prefetches were made.
        stats: counts.
    """

    def __init__(
        self, streams: Streams, limiter: Limiter, prefetcher: Prefetcher, stats: Stats
    ) -> None:
        self.streams, self.limiter, self.prefetcher = streams, limiter, prefetcher
        self.stats = stats

    def unshard(self, unit: Unit, reason: str) -> None:
        """Hold a unit that is needed now, and start to gather it, unless a prefetch has done it.
        The host may have to wait for the limiter; for the data it is the computation that waits,
        later."""
        unit.hold(reason)
        unit.reasons.discard(PREFETCH)  # its turn has come
        if unit.unsharded.needs_unshard and unit.state.sharded is ShardedState.SHARDED:
            self.limiter.admit(unit, needed=True)
            self._unshard(unit)

    def prefetch(self, target: Any, listed: bool = False) -> None:
        """Start to gather a unit that will be needed next, if that is so and there is room.

        Args:
            target: a unit or None; or several units, of which the program has said that there is
                room for them (prefetch_lists.py).
            listed: the target is one of these.
        """
        if isinstance(target, list):
            for one in target:
                self.prefetch(one, listed=True)
            return
        if target is None or not target.unsharded.needs_unshard:
            return
        if not self.prefetcher.is_sound(target):
            return
        if self.limiter.admit(target, needed=listed):
            self.stats.prefetches += 1
            self.prefetcher.ahead = target
            target.hold(PREFETCH)
            self._unshard(target)
        else:
            self.stats.declined_prefetches += 1

    def _unshard(self, unit: Unit) -> None:
        self.stats.count_unshard(unit.unsharded.nbytes)
        unshard(unit, self.streams)

    def reshard(self, unit: Unit) -> None:
        """Free a unit's parameters: no reason to keep them is left (unit_state.py), or they are of
        another precision or an older step. Does nothing if it is sharded already."""
        if unit.state.sharded is ShardedState.SHARDED:
            hide_views(unit)  # with NO_SHARD there are views, and nothing to free
        else:
            self.limiter.freed(unit, self.free(unit))

    def free(self, unit: Unit) -> Event:
        """Free the parameters of a unit that is not sharded. The caller tells the limiter, now or
        later, that the memory is free when the event is passed."""
        self.stats.count_reshard(unit.unsharded.nbytes)
        return reshard(unit, self.streams)

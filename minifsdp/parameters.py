"""The parameters of one root's units: gathered before use, ahead of use, and freed after it.

unshard.py and reshard.py know one unit. Here each of them meets what is shared by all units of a
model: the limit on how many may be unsharded (limiter.py), the choice of the next one
(prefetch.py), and the counts that ``model.engine.stats`` shows.
"""

import sys
from collections.abc import Iterable

from minifsdp.api import Stats
from minifsdp.checks.members import warn_of_leak
from minifsdp.limiter import Limiter
from minifsdp.prefetch import Prefetcher
from minifsdp.reshard import reshard
from minifsdp.streams import Event, Streams
from minifsdp.support.param_views import use_sharded_views, use_unsharded_views
from minifsdp.unit import Unit
from minifsdp.unit_state import BACKWARD, PREFETCH, ShardedState
from minifsdp.unshard import unshard, wait_for_unshard


class Parameters:
    """Unshards units, and frees each when its last reason to stay is gone (unit_state.py).

    Args:
        units: of one root.
        streams: of the device that the units are on; set anew when the model moves.
        limiter: asked before each gather, told of each free.
        prefetcher: told which prefetches were made.
        stats: counts.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        streams: Streams,
        limiter: Limiter,
        prefetcher: Prefetcher,
        stats: Stats,
    ) -> None:
        self.streams, self.limiter, self.prefetcher = streams, limiter, prefetcher
        self.stats = stats
        for unit in units:
            unit.free = self._free_after_use
        # Units that were freed early. To the limiter they are alive until their gradient is
        # complete: it would wait for the device otherwise, before the next unit is gathered.
        self._freed_early: dict[Unit, Event] = {}
        self._needed_again: set[Unit] = set()  # of these, the ones that had to be gathered again

    def unshard(self, unit: Unit, reason: str) -> None:
        """Hold a unit that is needed now, and start to gather it, unless a prefetch has done it.
        The host may have to wait for the limiter; for the data it is the computation that waits,
        later."""
        unit.hold(reason)
        unit.reasons.discard(PREFETCH)  # its turn has come
        if unit.unsharded.needs_unshard and unit.state.sharded is ShardedState.SHARDED:
            self._admit(unit, needed=True)
            self._unshard(unit)

    def prefetch(self, target: Unit | list[Unit] | None, listed: bool = False) -> None:
        """Start to gather a unit that will be needed next, if that is so and there is room.

        Args:
            target: or several, of which the program has said that there is room for them.
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
        if self._admit(target, needed=listed):
            self.prefetcher.issued(target)
            target.hold(PREFETCH)
            self._unshard(target)
        else:
            self.stats.declined_prefetches += 1

    def _admit(self, unit: Unit, needed: bool) -> bool:
        freed_early = self._freed_early.pop(unit, None) is not None
        return freed_early or self.limiter.admit(unit, needed=needed)

    def _unshard(self, unit: Unit) -> None:
        self.stats.count_unshard(unit.unsharded.nbytes)
        unit.gathered_version = unit.sharded_flat_param._version
        unshard(unit, self.streams)

    def reshard(self, unit: Unit) -> None:
        """Free a unit's parameters, whatever reasons there are: a step has failed, or they are of
        another precision or an older step. Does nothing if it is sharded already."""
        event = self._freed_early.pop(unit, None)
        if unit.state.sharded is ShardedState.SHARDED:
            use_sharded_views(unit)  # with NO_SHARD there are views, and nothing to free
        else:
            event = self._reshard(unit)
        if event is not None:
            self.limiter.freed(unit, event)

    def _reshard(self, unit: Unit) -> Event:
        self.stats.count_reshard(unit.unsharded.nbytes)
        return reshard(unit, self.streams)

    def reshard_early(self, unit: Unit) -> None:
        """Free a unit in its backward, before its gradient is complete. Does nothing if somebody
        refers to its parameters, or if this was once too early."""
        if unit in self._needed_again or unit.state.sharded is not ShardedState.UNSHARDED:
            return
        use_sharded_views(unit)  # modules refer to the others, too
        if unit.unsharded.is_in_use(unit.views):
            use_unsharded_views(unit)
        else:
            self._freed_early[unit] = self._reshard(unit)

    def unshard_again(self, unit: Unit) -> None:
        """Gather what was freed early, and is needed in this backward all the same: an activation
        checkpoint inside of the unit runs a part of it again."""
        self._needed_again.add(unit)
        self.unshard(unit, BACKWARD)
        wait_for_unshard(unit)
        use_unsharded_views(unit)

    def _free_after_use(self, unit: Unit) -> None:
        """No reason to keep the unit is left."""
        before = unit.leaks
        self.reshard(unit)
        # While an exception is on its way, its traceback refers to the views.
        if unit.leaks > before == 0 and sys.exc_info()[0] is None:
            warn_of_leak(unit)

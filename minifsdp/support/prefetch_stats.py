"""Prefetch statistics: how many prefetches there were, and how many had the wrong target.

The prefetcher (prefetch.py) chooses the targets. This observer is told what happened, and counts.
Its counts change no decision. A prefetch can find its target in three wrong states::

    already unsharded    there is nothing to do
    not needed yet       another unit is needed first, and its all-gather has to wait for this one
    already resharded    the unit has had its turn in this backward, and would be gathered in vain

None of them changes a result, because a prefetch only starts an all-gather early. They cost memory
or time.
"""

from minifsdp.unit import Unit
from minifsdp.unit_state import BACKWARD, FORWARD, PREFETCH, ShardedState

_TURN = {FORWARD, BACKWARD, PREFETCH}
MISTARGETS = ("already unsharded", "not needed yet", "already resharded")


class PrefetchStats:
    """The counts of one root on this rank, since it was built.

    Attributes:
        prefetches: all-gathers that were started as prefetches.
        mistargets: one of :data:`MISTARGETS` -> prefetches with this mistake. Those of the second
            kind are among ``prefetches``; the others were skipped.
    """

    def __init__(self) -> None:
        self.prefetches = 0
        self.mistargets = dict.fromkeys(MISTARGETS, 0)
        self._pending: Unit | None = None  # prefetched and not used yet

    def start_pass(self) -> None:
        """A forward or a backward starts. What the last one has prefetched does not count here."""
        self._pending = None

    def issued(self, target: Unit) -> None:
        """The all-gather of ``target`` is started as a prefetch."""
        self.prefetches += 1
        self._pending = target

    def skipped(self, target: Unit) -> None:
        """``target`` is not prefetched, because of the state that it is in."""
        if target.state.sharded is ShardedState.SHARDED:
            self.mistarget("already resharded", target)
        elif (
            target.reshard_after_forward and target.reasons <= _TURN and target is not self._pending
        ):
            # A unit that stays unsharded for another reason than its turn, or that was prefetched a
            # moment ago, is where it should be.
            self.mistarget("already unsharded", target)

    def needed(self, unit: Unit) -> None:
        """``unit`` is about to be used. If another one was prefetched in its place, count that."""
        pending = self._pending
        if unit is pending:
            self._pending = None
        elif (
            pending is not None
            and unit.unsharded.needs_unshard
            and unit.state.sharded is ShardedState.SHARDED
        ):
            self._pending = None  # count it once
            if pending.state.sharded is not ShardedState.SHARDED:
                self.mistarget("not needed yet", pending)

    def mistarget(self, kind: str, target: Unit) -> None:
        """``target`` was the wrong unit to prefetch. The virtual GPU (sim/) observes this method.

        Args:
            kind: one of :data:`MISTARGETS`.
        """
        self.mistargets[kind] += 1

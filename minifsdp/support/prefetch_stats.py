"""Prefetch statistics: how many prefetches had the wrong target.

The prefetcher (core/prefetch.py) chooses the targets. This file counts its mistakes, and does not
change a target. A prefetch can find its target in three wrong states::

    already unsharded    there is nothing to do
    not needed yet       another unit is needed first, and its all-gather has to wait for this one
    already resharded    the unit has had its turn in this backward, and would be gathered in vain

None of them changes a result, because a prefetch only starts an all-gather early. They cost memory
or time. The first and the last are seen when a target is turned down. The second is seen when a
unit is needed that was not gathered ahead, while another one was.
"""

from typing import Any

from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.prefetch import Prefetcher, forward_prefetch_of
from minifsdp.core.unit_state import BACKWARD, FORWARD, PREFETCH, ShardedState

_TURN = {FORWARD, BACKWARD, PREFETCH}
MISTARGETS = ("already unsharded", "not needed yet", "already resharded")


class PrefetchStats:
    """The counts of one root on this rank, since it was built.

    Attributes:
        mistargets: one of :data:`MISTARGETS` -> prefetches with this mistake. Those of the second
            kind were made; the others were not.
    """

    def __init__(self) -> None:
        self.mistargets = dict.fromkeys(MISTARGETS, 0)

    def mistarget(self, kind: str, target: Any) -> None:
        """``target`` was the wrong unit to prefetch. The virtual GPU (sim/) observes this method.

        Args:
            kind: one of :data:`MISTARGETS`.
        """
        self.mistargets[kind] += 1


class CountedPrefetcher(Prefetcher):
    """Counts targets that are turned down.

    Attributes:
        stats: the counts.
        ahead: the unit that was gathered ahead last, in this pass.
        forward_where_it_helps: whether :meth:`adapt_to` chooses ``forward``, by the device.
    """

    def __init__(self, backward: BackwardPrefetch | None, forward: ForwardPrefetch | None) -> None:
        super().__init__(backward, forward)
        self.stats = PrefetchStats()
        self.ahead: Any = None
        self.forward_where_it_helps = False

    def adapt_to(self, host_runs_ahead: bool) -> None:
        """Choose what ``forward_prefetch=None`` leaves open."""
        if self.forward_where_it_helps:
            self.forward = forward_prefetch_of(None, host_runs_ahead)

    def start_forward(self) -> None:
        """As in the core."""
        super().start_forward()
        self.ahead = None

    def start_backward(self) -> None:
        """As in the core."""
        super().start_backward()
        self.ahead = None

    def is_sound(self, target: Any) -> bool:
        """As in the core."""
        sound = super().is_sound(target)
        if not sound:
            self._turned_down(target)
        return sound

    def _turned_down(self, target: Any) -> None:
        if target.state.sharded is ShardedState.SHARDED:
            self.stats.mistarget("already resharded", target)
        elif target.reshard_after_forward and target.reasons <= _TURN and target is not self.ahead:
            # A unit that stays unsharded for another reason than its turn, or that was prefetched a
            # moment ago, is where it should be.
            self.stats.mistarget("already unsharded", target)


class Mistargets(Layer):
    """Counts units that were gathered ahead while another one was needed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def before_forward(self, call: Call) -> None:
        """The unit is about to be used. If another one was gathered in its place, count that."""
        prefetcher: Any = self._engine.prefetcher
        unit, ahead = call.unit, prefetcher.ahead
        if unit is ahead:
            prefetcher.ahead = None
        elif (
            ahead is not None
            and unit.unsharded.needs_unshard
            and unit.state.sharded is ShardedState.SHARDED
        ):
            prefetcher.ahead = None  # count it once
            if ahead.state.sharded is not ShardedState.SHARDED:
                prefetcher.stats.mistarget("not needed yet", ahead)

    before_backward = before_forward

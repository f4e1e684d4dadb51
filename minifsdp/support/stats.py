"""What one root has done on this rank: ``model.engine.stats``.

The core does not count. Here is the :class:`~minifsdp.core.parameters.Parameters` of minifsdp,
which does: how often units are gathered, how many are unsharded at one time, and what becomes of
prefetches. (How many of these were for the wrong unit is counted in prefetch_stats.py.)
"""

from dataclasses import dataclass
from typing import Any

from minifsdp.core.limiter import Limiter
from minifsdp.core.parameters import Parameters
from minifsdp.core.reshard import reshard
from minifsdp.core.streams import Event, Streams
from minifsdp.core.unit_state import PREFETCH
from minifsdp.core.unshard import unshard
from minifsdp.support.prefetch_stats import CountedPrefetcher


@dataclass
class Stats:
    """What one root has done on this rank since it was built.

    Units that are never sharded (NO_SHARD) do not count.
    """

    all_gathers: int = 0
    """Times that a unit was unsharded."""
    reductions: int = 0
    """Gradients whose reduction was started."""
    prefetches: int = 0
    """All-gathers that were started as prefetches."""
    declined_prefetches: int = 0
    """Prefetches that the limiter did not admit."""
    unsharded_units: int = 0
    """Units that are unsharded now."""
    unsharded_bytes: int = 0
    """Bytes of their unsharded flat parameters, padding included."""
    peak_unsharded_units: int = 0
    """The most units that were unsharded at one time."""
    peak_unsharded_bytes: int = 0
    """The most bytes that they had at one time."""

    def count_unshard(self, unit: Any) -> None:
        """A unit is being gathered, now or ahead of its turn."""
        nbytes = unit.unsharded.nbytes
        self.all_gathers += 1
        self.prefetches += PREFETCH in unit.reasons
        self.unsharded_units += 1
        self.unsharded_bytes += nbytes
        if self.unsharded_units > self.peak_unsharded_units:
            self.peak_unsharded_units = self.unsharded_units
        if self.unsharded_bytes > self.peak_unsharded_bytes:
            self.peak_unsharded_bytes = self.unsharded_bytes

    def count_reshard(self, unit: Any) -> None:
        """A unit is freed."""
        self.unsharded_units -= 1
        self.unsharded_bytes -= unit.unsharded.nbytes


class CountedParameters(Parameters):
    """Counts what it does.

    Attributes:
        stats: the counts.
    """

    prefetcher: CountedPrefetcher

    def __init__(
        self, streams: Streams, limiter: Limiter, prefetcher: CountedPrefetcher, stats: Stats
    ) -> None:
        super().__init__(streams, limiter, prefetcher)
        self.stats = stats

    def _unshard(self, unit: Any) -> None:
        self.stats.count_unshard(unit)
        if PREFETCH in unit.reasons:
            self.prefetcher.ahead = unit
        unshard(unit, self.streams)

    def _declined(self, target: Any) -> None:
        self.stats.declined_prefetches += 1

    def free(self, unit: Any) -> Event:
        """As in the core."""
        self.stats.count_reshard(unit)
        return reshard(unit, self.streams)

"""What one root has done on this rank: ``model.engine.stats``.

The core does not count. A limiter is asked before each gather and hears of each free, so a wrapper
around it can count: how often units are gathered, how many are unsharded at one time, and what
becomes of prefetches. (prefetch_stats.py counts how many of these were for the wrong unit.)
"""

from dataclasses import dataclass
from typing import Any

from minifsdp.core.limiter import Limiter
from minifsdp.core.streams import Event
from minifsdp.core.unit_state import PREFETCH
from minifsdp.support.prefetch_stats import CountedPrefetcher


@dataclass
class Stats:
    """What one root has done on this rank since it was built.

    Units that are never sharded (NO_SHARD) count only in ``reductions``.
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
    """The most bytes that unsharded units had at one time."""

    def count_free(self, unit: Any) -> None:
        """A unit is freed."""
        self.unsharded_units -= 1
        self.unsharded_bytes -= unit.unsharded.nbytes


class CountedLimiter:
    """A limiter, and counts of what it admits and of what it hears.

    Args:
        inner: decides.
        prefetcher: hears of units that are gathered ahead.
        stats: the counts.
    """

    def __init__(self, inner: Limiter, prefetcher: CountedPrefetcher, stats: Stats) -> None:
        self.inner, self.prefetcher, self.stats = inner, prefetcher, stats

    def admit(self, unit: Any, needed: bool) -> bool:
        """As ``inner`` does."""
        stats = self.stats
        if not self.inner.admit(unit, needed):
            stats.declined_prefetches += 1
            return False
        if not needed or PREFETCH in unit.reasons:  # what a program has listed has to be admitted
            stats.prefetches += 1
            self.prefetcher.ahead = unit
        stats.all_gathers += 1
        stats.unsharded_units += 1
        stats.unsharded_bytes += unit.unsharded.nbytes
        if stats.unsharded_units > stats.peak_unsharded_units:
            stats.peak_unsharded_units = stats.unsharded_units
        if stats.unsharded_bytes > stats.peak_unsharded_bytes:
            stats.peak_unsharded_bytes = stats.unsharded_bytes
        return True

    def freed(self, unit: Any, event: Event) -> None:
        """As ``inner`` does."""
        self.stats.count_free(unit)
        self.inner.freed(unit, event)

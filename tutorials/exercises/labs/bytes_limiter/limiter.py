"""Lab: a limiter by bytes.

A limit of two admits two units, whatever their size. Two large units need much memory, and two
small ones are too few to hide the latency of their gathers. Write a limiter that counts bytes.

Measured: reserved memory of a training step on a virtual GPU. 48 small units, two large ones in the
middle. Less is better.
Rules: a step takes no longer than with ``limit_all_gathers=2`` (1 % is forgiven). No races. On real
ranks the values are right. The answers may depend on the order of the calls, and not on times.

``ByteLimiter()`` of this file is what the engine gets for ``limit_all_gathers``. As it is given, it
is a limit of two. ``unit.unsharded.nbytes`` says what a unit takes. The limiter sees a unit when it
is admitted, and not before. (``Limiter``, in minifsdp/core/limiter.py, says what the two methods
are asked, and ``wait_for_free(event)`` waits.)
"""

from minifsdp.core.limiter import EventQueue
from minifsdp.core.streams import Event
from minifsdp.core.unit import Unit


class ByteLimiter(EventQueue):
    """At most two units are alive at the same time, whatever their size."""

    def __init__(self) -> None:
        super().__init__(2)

    def admit(self, unit: Unit, needed: bool) -> bool:
        """Wait until there is room for ``unit``; False declines a prefetch."""
        return super().admit(unit, needed)

    def freed(self, unit: Unit, event: Event) -> None:
        """The host has freed ``unit``; the device has when ``event`` is passed."""
        super().freed(unit, event)

"""Lab: a prefetcher that looks two units ahead.

A large unit after a small one: the small one's computation is too short to hide the large one's
gather. The limiter has room for a third unit. Use it in the backward.

Measured: the time of a training step on a virtual GPU with a slow network. Small and large units in
turn, ``limit_all_gathers=3``. Less is better.
Rules: not more units alive and not more reserved memory than with the default (1 % is forgiven).
No races, no prefetch of a wrong unit. On real ranks the values are right.

``Prefetcher`` here takes the place of the engine's. The engine calls ``pre_backward`` before a unit
computes and ``post_backward`` when its gradient is there, just before its reduction starts. Each
returns a unit to gather now, or None. ``pre_backward_order`` has the order of the last step.
``unit.state.sharded`` says whether a unit is gathered. (Do not call ``is_sound``: it counts a wrong
prefetch each time that it says no.) This one is the default.
"""

from minifsdp.core.prefetch import Prefetcher as Default
from minifsdp.core.unit import Unit


class Prefetcher(Default):
    """One unit ahead."""

    def pre_backward(self, unit: Unit) -> Unit | None:
        """The backward of ``unit`` begins. Returns the unit after it."""
        return super().pre_backward(unit)

    def post_backward(self, unit: Unit) -> Unit | None:
        """The backward of ``unit`` has ended. Returns None, with the default BACKWARD_PRE."""
        return super().post_backward(unit)

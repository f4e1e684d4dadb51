"""The walks of ``state_dict()`` and ``load_state_dict()`` through a tree of modules.

torch calls a hook when a walk comes to a module and another one when it leaves. In between the
module's unit is held gathered (state_dict.py). If something raises, the second hook is never
called. So whoever begins something new asks here first, and what a dead walk holds is let go.
"""

import sys
from contextlib import ExitStack
from types import FrameType

from torch import nn

from minifsdp.unit import Unit


class StateDictCalls:
    """Those of one root's units that are under way, or were when something raised."""

    def __init__(self) -> None:
        self.held: dict[Unit, ExitStack] = {}  # in the order in which the walk came to them

    def close_dead(self, unit: Unit | None = None) -> None:
        """Let go of what a dead walk holds. What it has loaded is dropped: all of it, or none.

        Args:
            unit: a walk comes there now, so that one which had come there before is dead.
        """
        if self.held and (unit in self.held or not _under_way(sys._getframe())):
            held, self.held = self.held, {}
            for stack in held.values():
                stack.__exit__(RuntimeError, RuntimeError("the walk was not finished"), None)


def _under_way(frame: FrameType | None) -> bool:
    """Whether a module's ``state_dict`` or ``load_state_dict`` is among the callers."""
    walks = (nn.Module.state_dict.__code__, nn.Module.load_state_dict.__code__)
    while frame is not None and frame.f_code not in walks:
        frame = frame.f_back
    return frame is not None

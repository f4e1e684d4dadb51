"""Calls of ``state_dict()`` and ``load_state_dict()`` that are in progress.

torch visits the tree of modules, and calls one hook before it visits a module and another one after
it. In between the module's unit is unsharded (state_dict.py)::

    before root, before 1, after 1, before 2, after 2, after root
    before root, before 1, exception                             1 and root stay unsharded

After an exception the second hook is never called. So each forward and backward, and each access to
unsharded parameters, first calls :meth:`StateDictCalls.close_aborted`.
"""

import sys
from contextlib import ExitStack
from types import FrameType

from torch import nn

from minifsdp.core.layers import Layer
from minifsdp.featured_unit import FeaturedUnit


class StateDictCalls(Layer):
    """The calls for the units of one root that are in progress, or that an exception has ended.

    Attributes:
        held: unit -> what reshards it, in the order in which the units were visited.
    """

    def __init__(self) -> None:
        self.held: dict[FeaturedUnit, ExitStack] = {}

    def enter(self, unit: FeaturedUnit) -> None:
        """A forward may begin: a call that still holds units was ended by an exception."""
        self.close_aborted()

    def enter_backward(self) -> None:
        """As :meth:`enter`."""
        self.close_aborted()

    def close_aborted(self, unit: FeaturedUnit | None = None) -> None:
        """If an exception has ended the call that holds units, reshard these units. What the call
        has loaded is dropped: otherwise some parameters would be loaded and others not.

        Args:
            unit: a call visits it now. If it is held already, it is by an earlier call.
        """
        if self.held and (unit in self.held or not _in_progress(sys._getframe())):
            held, self.held = self.held, {}
            for stack in held.values():
                stack.__exit__(RuntimeError, RuntimeError("an exception ended the call"), None)


def _in_progress(frame: FrameType | None) -> bool:
    """Whether a module's ``state_dict`` or ``load_state_dict`` is among the callers."""
    functions = (nn.Module.state_dict.__code__, nn.Module.load_state_dict.__code__)
    while frame is not None and frame.f_code not in functions:
        frame = frame.f_back
    return frame is not None

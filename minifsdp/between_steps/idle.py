"""Idle: what is done before control returns to the program.

The program may look at parameters now, or change them:

- Other ranks of this machine may still be reading this rank's shards (comm/transport.py). With
  offload the device may, too: it copies them from the host. An optimizer must not write to the
  shards before these reads are over.
- The modules of units in rows have their DTensors now, as an optimizer sees them. From a forward to
  the end of its backward they have placeholders (param_access.py) while their unit is sharded.
"""

from collections.abc import Sequence

import torch

from minifsdp.checks.param_changes import check_unreplaced
from minifsdp.comm.transport import wait_for_readers
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.unit_state import Purpose
from minifsdp.featured_unit import FeaturedUnit


class Readers(Layer):
    """Waits for those who read shards, before a program's optimizer may write to them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._offload = any(unit.offload_from is not None for unit in engine.units)

    def idle(self, graph: bool) -> None:
        """The program may change parameters now."""
        self.wait()

    def wait(self) -> None:
        """Block the host until nobody reads this rank's shards any more."""
        wait_for_readers()
        if self._offload:
            self._engine.streams.upload.record_event().synchronize()


class ShownParams(Layer):
    """Shows the DTensors when no backward is to come, and hides them before a forward without
    gradients.

    Args:
        units: of the root.
    """

    def __init__(self, units: Sequence[FeaturedUnit]) -> None:
        self._units = units
        self._graph_waits = False  # there was a forward before this one, and not yet its backward

    def start(self, purpose: Purpose) -> None:
        """Hide the DTensors before a forward without gradients: see hide_divided_params."""
        if purpose is Purpose.LOOK:
            return
        self._graph_waits = hides_params(self._units)
        if not torch.is_grad_enabled():
            hide_divided_params(self._units)

    def start_backward(self, call: Call | None) -> None:
        """The backward that was waited for."""
        self._graph_waits = False

    def idle(self, graph: bool) -> None:
        """If no backward is to come, the program may want to see the DTensors."""
        if not graph and not self._graph_waits:
            show_divided_params(self._units)

    def broken(self) -> None:
        """The program goes on without the rest of this backward."""
        show_divided_params(self._units)


def hides_params(units: Sequence[FeaturedUnit]) -> bool:
    """Whether units in rows have placeholders, for a backward that is still to come."""
    return any(unit.mesh is not None and unit.has_placeholders for unit in units)


def hide_divided_params(units: Sequence[FeaturedUnit]) -> None:
    """Undo :func:`show_divided_params`, for a forward without gradients: there a module may compute
    with the parameters of a module inside of it, without calling that module."""
    for unit in units:
        if unit.mesh is not None and not unit.shows_views and not unit.has_placeholders:
            check_unreplaced(unit)
            unit.places.hide(unit)


def show_divided_params(units: Sequence[FeaturedUnit]) -> None:
    """Let the modules of units in rows have their DTensors, in place of placeholders.

    This is for the time between steps. From a forward to the end of its backward the placeholders
    stay: what a checkpoint runs again may need a parameter of a unit that is sharded. A placeholder
    has that unit gathered; with a DTensor the module would compute as it is.
    """
    for unit in units:
        if unit.mesh is not None and not unit.shows_views and unit.has_placeholders:
            unit.places.show(unit, unit.optimized_params)

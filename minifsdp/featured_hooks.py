"""The moments of a forward and of a backward, with what the features need of them.

core/hooks.py and core/backward.py have the moments themselves. Here a program's dispatch modes see
nothing of them (dispatch_modes.py), and a module may be called while parameters are out between
steps (between_steps/full_params.py).
"""

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from minifsdp.chunks.unit_dtensors import Form
from minifsdp.core.backward import Backward
from minifsdp.core.hooks import Hooks
from minifsdp.dispatch_modes import never_compile_inside, without_modes
from minifsdp.featured_engine import FeaturedEngine
from minifsdp.featured_unit import FeaturedUnit


class FeaturedBackward(Backward):
    """The moments of a backward, of which a program's modes see nothing."""

    before_backward = without_modes(Backward.before_backward)
    after_gradient = without_modes(Backward.after_gradient)
    end_of_backward = without_modes(Backward.end_of_backward)

    @property
    def running_anywhere(self) -> bool:
        """Whether a backward is running, also in another thread. On a GPU a program may catch the
        error of a backward before autograd's own thread has let go of it. So wait a tenth of a
        second for that: else calls in the program's ``except`` would be refused."""
        for _ in range(100):
            if self.running or self.queued() is None:
                break
            time.sleep(0.001)
        return self.queued() is not None


class FeaturedHooks(Hooks):
    """The moments of a forward, of which a program's modes see nothing but the module's own.

    Attributes:
        summoned: units whose parameters are out between steps, with the form of DTensors that they
            have; None for full parameters.
    """

    engine: FeaturedEngine
    backward: FeaturedBackward

    def __init__(self, backward: FeaturedBackward) -> None:
        super().__init__(backward)
        self.summoned: dict[FeaturedUnit, Form | None] = {}

    @property
    def idle(self) -> bool:
        """Whether no forward and no backward is running."""
        return self.depth == 0 and not self.backward.running_anywhere

    @never_compile_inside
    def runs(self, unit: FeaturedUnit) -> bool:
        """Whether a forward of this unit is running."""
        return any(call.unit is unit for call in self.calls)

    before_forward = without_modes(Hooks.before_forward)
    after_forward = without_modes(Hooks.after_forward)
    forward_failed = without_modes(Hooks.forward_failed)
    inputs_have_gradients = without_modes(Hooks.inputs_have_gradients)

    def forward_between_steps(
        self,
        unit: FeaturedUnit,
        module: nn.Module,
        run: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module while parameters are out. If those of its unit are, it just runs. Else the
        unit is gathered for the time of the forward, which is part of no step. Arguments as in
        :meth:`forward`."""
        for method in self.engine.moments.enter:
            method(unit)
        if not self.summoned:  # those of a state dict that an exception has ended are put away now
            return self.forward(unit, module, run, args, kwargs)
        if unit in self.summoned:
            return run(*args, **kwargs)
        self.depth += 1  # as inside of another forward: no step begins, and none ends
        try:
            return self.forward(unit, module, run, args, kwargs)
        finally:
            self.depth -= 1
            del self.calls[self.depth :]

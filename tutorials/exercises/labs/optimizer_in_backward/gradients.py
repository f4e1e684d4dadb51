"""Lab: an optimizer that runs inside the backward.

A post-accumulate-grad hook on each sharded flat parameter steps an optimizer and drops the
gradient. These hooks are called at the end of the backward, for the reductions that ``finish()``
returns (support/grad_hooks.py), so all gradients are alive then. Hand each gradient over as soon as
it is reduced, and its memory is free for the next one.

Measured: allocated memory of a training step on a virtual GPU, one of two. Less is better.
Rules: a step takes no longer than with the default (1 % is forgiven), so do not wait for a
reduction that has just started. No races. On real ranks, losses and parameters are those of DDP
with an ordinary Adam, in every bit.

``Gradients`` here takes the place of the engine's. This one is the engine's; see
minifsdp/core/gradients.py. What is given up: after a backward that fails, some units are stepped
and some are not.
"""

from torch import Tensor

from minifsdp.core.gradients import Gradients as Default
from minifsdp.core.reduce import Reduction
from minifsdp.core.unit import Unit


class Gradients(Default):
    """Those of the backward that is under way, in ``self._reductions``."""

    def take(self, unit: Unit, grad: Tensor) -> None:
        """Start to reduce ``grad``; by then the reduction before it is complete."""
        super().take(unit, grad)

    def finish(self) -> list[Reduction]:
        """Wait for all reductions, then hand everything over.

        Returns:
            Those whose hooks are still to be called.
        """
        return super().finish()

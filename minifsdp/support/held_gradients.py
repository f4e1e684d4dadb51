"""Gradients that wait.

A gradient is reduced when it is complete (core/gradients.py). Two features have some wait until the
backward is over, each with a reason of its own in ``unit.waits``: no_sync.py, which reduces them in
a later backward, and ranks that use different units (checks/rank_agreement.py), which reduce them
in one order. While a unit has a reason to wait, its gradient is held here.
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.core.gradients import Gradients
from minifsdp.core.streams import Streams
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.rows import Rows
from minifsdp.support.marked_views import mark_unused
from minifsdp.support.stats import Stats


class HeldGradients(Gradients):
    """Holds gradients that wait, and counts reductions.

    Attributes:
        held: unit -> gradient, ``[trained_numel]``, for each gradient that waits.
    """

    def __init__(self, streams: Streams, stats: Stats) -> None:
        super().__init__(streams)
        self.stats = stats
        self.held: dict[Any, Tensor] = {}

    def take(self, unit: Any, grad: Any) -> None:
        """As in the core, or hold the gradient if it has to wait. A second part is added to the
        first. A ``grad`` that is not a tensor is made one by its ``whole()``."""
        if unit.waits:
            before = self.held.get(unit)
            part = grad if isinstance(grad, Tensor) else grad.whole()
            self.held[unit] = part if before is None else before.add_(part)
        else:
            self.stats.reductions += 1
            super().take(unit, grad)

    def reduce_held(self, unit: FeaturedUnit) -> None:
        """Reduce the gradient that is held for a unit; if there is none, reduce zeros."""
        grad = self.held.pop(unit, None)
        self.stats.reductions += 1
        super().take(unit, no_gradient(unit) if grad is None else grad)

    def drop(self) -> None:
        """As in the core."""
        self.held.clear()
        super().drop()


def no_gradient(unit: FeaturedUnit) -> Tensor:
    """What a rank sends if it has no gradient of a unit that others have one of: zeros
    ``[trained_numel]``, in the dtype of the gradient; in rows they are marked as unused."""
    size, dtype = unit.unsharded.flat_param.numel(), unit.unsharded.dtype
    zeros = torch.zeros(size, dtype=dtype, device=unit.device)
    if isinstance(unit.layout, Rows) and unit.layout.marks:
        mark_unused(unit, zeros, [*unit.layout.marked])
    return zeros

"""How others do it, and did: five ways to gather ahead without filling the memory, side by side.

::

                      fairscale 1       fairscale 2       PyTorch            minifsdp
    forward           next, before      next, after       (off)              (off)
    prefetches        computing         freeing
      by the order    pre-forward       post-forward
    backward          next, before      next, after       next, before       next, before
    prefetches        computing         freeing           computing          computing
      by the order    reversed          pre-backward      reversed           pre-backward
                      pre-forward                         post-forward
    the host waits    for compute,      for compute,      for an old free,   until units alive
                      at every free     at every free     at every gather    are fewer than two

Each is the engine with another prefetcher or limiter, and only minifsdp frees a unit before its
gradient is complete: this is all that they differ in. The fifth, FSDP2's, prefetches as PyTorch's
FSDP1, and its host never waits: see fsdp2.py. Training comes out the same; memory and time do
not::

    with minifsdp.sim.cluster() as gpu:
        model = APPROACHES["fairscale 1"].wrap(module, auto_wrap_policy=...)

Sources: fairscale PR 972 (approach 1) and PR 1052 (approach 2), never merged; torch's
``_exec_order_utils.py``, ``_limiter_utils.py`` and ``_runtime_utils.py``.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from minifsdp.core.api import BackwardPrefetch, ForwardPrefetch
from minifsdp.core.limiter import EventQueue, Limiter, NoLimit, SynchronizeAfterFree, wait_for_free
from minifsdp.core.parameters import Parameters
from minifsdp.core.prefetch import Order
from minifsdp.core.streams import Event
from minifsdp.core.unit import Unit
from minifsdp.fully_sharded import FullyShardedDataParallel
from minifsdp.on_demand import OnDemand
from minifsdp.sim.training.fsdp2 import StreamOrdered
from minifsdp.support.prefetch_stats import CountedPrefetcher
from minifsdp.support.stats import CountedLimiter


class ReversedPreForward(CountedPrefetcher):
    """fairscale's first: the backward goes through the units as the forward came to them, from the
    last to the first. Not so where a unit is inside another: both orders begin with the outer."""

    def start_backward(self) -> None:
        super().start_backward()
        self.pre_backward_order.last = list(reversed(self.pre_forward_order.current))


class ReversedPostForward(CountedPrefetcher):
    """PyTorch's: from the last unit that the forward was done with to the first. Right for units in
    units; wrong where the loss does not depend on all of them."""

    def start_backward(self) -> None:
        super().start_backward()
        self.pre_backward_order.last = list(reversed(self.post_forward_order.current))

    def post_backward(self, unit: Unit) -> Unit | None:
        # What follows the unit that ends. But a unit ends when its first layer is done, which may
        # be long after those inside of it have begun.
        if self.backward is not BackwardPrefetch.BACKWARD_POST:
            return None
        order = Order()
        order.last = self.pre_backward_order.last
        return order.visit(unit)


class LettingGo(ReversedPostForward):
    """FSDP2's: PyTorch's order; and what was gathered last in a forward is freed at its end."""

    parameters: StreamOrdered

    def post_forward(self, unit: Unit) -> Unit | None:
        if not unit.ancestors:
            self.parameters.let_go()
        return super().post_forward(unit)


class DriftingQueue:
    """PyTorch's event queue: before a gather, if two frees or more are on it, wait for the oldest.
    A step's last frees stay on it, so that from the second step on the oldest is an older one."""

    def __init__(self) -> None:
        self._frees: deque[Event] = deque()

    def admit(self, unit: Unit, needed: bool) -> bool:
        if len(self._frees) >= 2:
            wait_for_free(self._frees.popleft())
        return True

    def freed(self, unit: Unit, event: Event) -> None:
        self._frees.append(event)


@dataclass(frozen=True)
class Approach:
    """A way to gather ahead, and to be kept from it."""

    forward: ForwardPrefetch | None
    backward: BackwardPrefetch | None
    prefetcher: type[CountedPrefetcher]
    limiter: Callable[[], Limiter]
    parameters: type[Parameters] = Parameters
    frees_early: bool = False  # a unit in a backward, before its gradient is complete

    def wrap(self, module: nn.Module, **settings: Any) -> FullyShardedDataParallel:
        """``FullyShardedDataParallel(module, **settings)`` that trains in this way."""
        model = FullyShardedDataParallel(module, limit_all_gathers=self.limiter(), **settings)
        self.take_over(model)
        return model

    def take_over(self, model: FullyShardedDataParallel) -> None:
        """Have a model train in this way, all but the limiter, which it was built with."""
        engine, prefetcher = model.engine, self.prefetcher(self.backward, self.forward)
        engine.prefetcher = prefetcher
        limiter = CountedLimiter(engine.limiter, prefetcher, engine.stats)
        engine.parameters = self.parameters(engine.streams, limiter, prefetcher)
        engine.layer(OnDemand).frees_early = self.frees_early
        if isinstance(prefetcher, LettingGo) and isinstance(engine.parameters, StreamOrdered):
            prefetcher.parameters = engine.parameters


_PRE, _POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST

APPROACHES = {
    "fairscale 1": Approach(
        ForwardPrefetch.FORWARD_PRE, _PRE, ReversedPreForward, SynchronizeAfterFree
    ),
    "fairscale 2": Approach(
        ForwardPrefetch.FORWARD_POST, _POST, CountedPrefetcher, SynchronizeAfterFree
    ),
    "PyTorch": Approach(None, _PRE, ReversedPostForward, DriftingQueue),
    # The default has the queue's room, a third unit. This limit is strict, to be compared with it.
    "minifsdp": Approach(None, _PRE, CountedPrefetcher, lambda: EventQueue(2), frees_early=True),
    "FSDP2": Approach(None, _PRE, LettingGo, NoLimit, StreamOrdered),
}

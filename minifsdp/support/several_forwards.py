"""Several forwards, one backward: a unit is gathered for each of them in the backward, too.

Contrastive training, D(real) + D(fake), and backpropagation through time run a model several times,
and then one backward through all of these forwards, the last one first. A unit's gradient is
complete when the backward has come to its first use. If the unit stayed gathered until then, so
would all units, each from its last use on::

    forwards     a b   a b
    backward                b    a    b    a       loss(model(x)) + loss(model(y))
    gathered                b    ab   ab   a       until its gradient is complete
                            b    a    b    a       for one forward at a time

So a unit is freed when the backward has gone through its *views* of one forward (core/views.py), if
it will come to those of an earlier one. Autograd tells both: the operation that joins the gradients
of the views runs last, and autograd can be asked whether a backward will come to it.

A unit that was freed is gathered again, and ranks gather together. But a loss may leave out some of
the forwards on some ranks. So when a backward begins, the ranks compare what it will come to, and
if that differs all units stay to the end (checks/rank_agreement.py).
"""

from functools import partial
from itertools import compress
from typing import Any
from zlib import crc32

import torch
from torch.autograd.graph import Node

from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.unit_state import BACKWARD, Purpose, TrainingState
from minifsdp.dispatch_modes import without_modes
from minifsdp.featured_unit import FeaturedUnit

MOST = 10_000  # uses that are noted: an evaluation outside of no_grad has no backward


class SeveralForwards(Layer):
    """Frees the units of one root after each of several forwards that a backward goes through."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Of each forward since the last backward, the units and what has made a view of them.
        self._forwards: list[dict[FeaturedUnit, Node]] = []
        self._uses: dict[FeaturedUnit, Node] = {}  # those of the last forward
        self._reached: list[tuple[FeaturedUnit, Node]] = []  # by the backward that has begun
        self._hooks: list[Any] = []

    def start(self, purpose: Purpose) -> None:
        """A forward begins."""
        if purpose is not Purpose.LOOK and torch.is_grad_enabled():
            self._uses = {}
            if len(self._forwards) * len(self._engine.units) < MOST:
                self._forwards.append(self._uses)

    def gathered(self, call: Call) -> None:
        """Note the first use of a unit in a forward, to which a backward comes last."""
        if torch.is_grad_enabled() and call.unit.unsharded.needs_unshard:
            for view in call.unit.views:
                if view.grad_fn is not None:  # else it is of a frozen parameter
                    self._uses.setdefault(call.unit, view.grad_fn)
                    break

    def checksum(self) -> int:
        """Of the uses that the backward will come to, which has just begun; 0 if there was one
        forward. Ranks compare it before :meth:`start_backward`."""
        if len(self._forwards) < 2:
            return 0
        uses = [(unit, _joins(made)) for uses in self._forwards for unit, made in uses.items()]
        reached = [torch._C._will_engine_execute_node(node) for _, node in uses]
        self._reached = [*compress(uses, reached)]
        return crc32(bytes(reached))

    def start_backward(self, call: Call | None) -> None:
        """Free each unit after each forward but the first one that this backward comes to: there
        its gradient is complete."""
        reached, self._reached = self._reached, []
        earlier = set[FeaturedUnit]()
        for unit, joins in reached:
            if unit in earlier:
                self._hooks.append(joins.register_prehook(partial(self._end_of_forward, unit)))
            earlier.add(unit)

    @without_modes
    def _end_of_forward(self, unit: FeaturedUnit, grads: object) -> None:
        """The backward has gone through all views of a unit that one forward has had. (Not so if it
        is that of a reentrant checkpoint, inside of another one: it goes through a part.)"""
        if unit.state.graph_task == torch._C._current_graph_task_id():
            unit.let_go(BACKWARD)
            unit.state.end_backward()  # that of an earlier forward may begin
            self._engine.parameters.prefetch(self._engine.prefetcher.post_backward(unit))

    def end_of_backward(self) -> None:
        """The graphs are gone. Only an ``autograd.grad()`` for an input that keeps its graph, as a
        gradient penalty does, leaves them to the backward of the loss."""
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        complete = (u.state.training is TrainingState.POST_BACKWARD for u in self._engine.units)
        if any(complete) or not keeps_graph:
            self._forwards, self._uses = [], {}
        self._remove_hooks()

    def failed(self) -> None:
        """An exception has ended a forward or a backward."""
        self._forwards, self._uses, self._reached = [], {}, []
        self._remove_hooks()

    broken = failed

    def _remove_hooks(self) -> None:
        # Another backward may go through a graph that is kept, and come to something else.
        while self._hooks:
            self._hooks.pop().remove()


def _joins(node: Any) -> Node:
    """The operation whose backward joins the gradients of all views that a forward has had of a
    unit: the last one before the unsharded flat parameter.

    Args:
        node: what has made one of the views.
    """
    while (following := node.next_functions[0][0]).next_functions:
        node = following
    joins: Node = node
    return joins

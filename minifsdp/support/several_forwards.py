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
if that differs all units stay to the end (checks/rank_agreement.py, which also says what GPUs do).
"""

from collections.abc import Collection
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch.autograd.graph import Node

from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.unit_state import BACKWARD, Purpose, TrainingState
from minifsdp.dispatch_modes import without_modes
from minifsdp.featured_unit import FeaturedUnit

MOST = 10_000  # uses of units that are noted: a program may never call backward

Uses = list[tuple[FeaturedUnit, Node]]
"""In the order of a forward: the unit of each call, and what has made a view of it."""


class SeveralForwards(Layer):
    """Frees the units of one root after each of several forwards that a backward goes through."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._noted: list[Uses] = []  # of each forward since the last backward
        self._uses: Uses = []  # of the last forward
        # The same forwards, as the backward sees them that has begun: the units, the operations
        # that join their gradients, and whether it will come to these.
        self._ahead: list[list[tuple[FeaturedUnit, Node, bool]]] = []
        self._hooks: list[Any] = []

    def start(self, purpose: Purpose) -> None:
        """A forward begins."""
        if purpose is not Purpose.LOOK and torch.is_grad_enabled():
            self._uses = []
            if sum(map(len, self._noted)) < MOST:
                self._noted.append(self._uses)

    def gathered(self, call: Call) -> None:
        """Note that the unit is used."""
        if torch.is_grad_enabled() and call.unit.unsharded.needs_unshard:
            for view in call.unit.views:
                if view.grad_fn is not None:  # else it is of a frozen parameter
                    self._uses.append((call.unit, view.grad_fn))
                    break

    def look_ahead(self) -> None:
        """A backward has begun: find out which uses it will come to, if there were several
        forwards."""
        self._ahead = []
        for uses in self._noted if len(self._noted) > 1 else ():
            joins = [(unit, _joins(made)) for unit, made in uses]
            comes = torch._C._will_engine_execute_node
            self._ahead.append([(unit, node, comes(node)) for unit, node in joins])

    def checksum(self, units: Collection[FeaturedUnit]) -> int:
        """Of what :meth:`look_ahead` has found of these units, for ranks to compare."""
        ahead = (use for uses in self._ahead for use in uses)
        return crc32(bytes(comes for unit, _, comes in ahead if unit in units))

    def start_backward(self, call: Call | None) -> None:
        """Free each unit after each forward but the earliest, where its gradient is complete."""
        earlier = set[FeaturedUnit]()
        for uses in self._ahead:
            # A backward comes to the first use in a forward last.
            last = {unit: joins for unit, joins, comes in reversed(uses) if comes}
            for unit in last.keys() & earlier:
                hook = partial(self._end_of_forward, unit)
                self._hooks.append(last[unit].register_prehook(hook))
            earlier |= last.keys()
        self._ahead = []

    @without_modes
    def _end_of_forward(self, unit: FeaturedUnit, grads: object) -> None:
        """The backward has gone through all views of a unit that one forward has had. (A reentrant
        checkpoint has a backward inside of this one. That goes through a part, and frees nothing.)
        """
        if unit.state.graph_task == torch._C._current_graph_task_id():
            unit.let_go(BACKWARD)
            unit.state.end_backward()  # that of an earlier forward may begin
            self._engine.parameters.prefetch(self._engine.prefetcher.post_backward(unit))

    def end_of_backward(self) -> None:
        """Forget the forwards: their graphs are gone, or ranks have not compared what is left. Only
        a gradient penalty (``autograd.grad()`` for an input, which keeps its graph) leaves them to
        the backward of the loss."""
        trained = (u for u in self._engine.units if u.sharded_flat_param.requires_grad)
        complete = any(u.state.training is TrainingState.POST_BACKWARD for u in trained)
        if complete or not torch._C._autograd._get_current_graph_task_keep_graph():
            self._noted, self._uses = [], []
        self._remove_hooks()

    def failed(self) -> None:
        """An exception has ended a forward or a backward."""
        self._noted, self._uses, self._ahead = [], [], []
        self._remove_hooks()

    broken = failed

    def _remove_hooks(self) -> None:
        # Another backward may go through a graph that is kept, and come to something else.
        while self._hooks:
            self._hooks.pop().remove()


def _joins(node: Any) -> Node:
    """The operation whose backward joins the gradients of all views that a forward has had of a
    unit: the last one before the unsharded flat parameter. (``before_joining`` in piece_views.py
    hooks the same one. Here a view may be a DTensor already, with more operations in between.)

    Args:
        node: what has made one of the views.
    """
    while (following := node.next_functions[0][0]).next_functions:
        node = following
    joins: Node = node
    return joins

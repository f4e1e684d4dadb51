"""Sharded parameters in a graph of autograd, where unsharded ones belong.

Modules compute with unsharded parameters, and a reduction gives the sharded ones their gradients.
But ``parameters()`` lists the sharded ones between the forwards of their unit, and a program may
compute with those::

    loss += sum(p.norm() for p in model.parameters())      each rank has the norms of its shards
    Checkpoint.apply(block, x, *block.parameters())        gets no gradient for any of them

autograd then comes to a sharded parameter by itself. The first program may be right, if it takes a
sum over elements; in chunks it is warned of. (In rows a DTensor knows that it is a part.)

In the second one, ``Checkpoint`` is an ``autograd.Function`` of the program's own. Its backward
runs the block again, and asks ``torch.autograd.grad`` for gradients of what it was given. The block
computes with unsharded parameters, so there are none, and the unit would silently not be trained.
That is refused. The adjoint method of a neural ODE does the same.

A hook on autograd's node of a parameter sees that a backward comes to it. A node lives as long as a
graph has it, or somebody keeps it. In chunks this layer keeps it. In rows it must not:
``model.double()`` swaps DTensors, which torch refuses while a node is kept. So in rows the hook is
set when a backward starts, in the first steps only, since that takes time.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from minifsdp.checks.rank_agreement import CHECKED_STEPS
from minifsdp.core.backward import Backward
from minifsdp.core.layers import Call, Layer
from minifsdp.core.unit_state import Purpose, TrainingState
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.dtensors import local_of


class ParamsInGraphs(Layer):
    """Watches the sharded parameters of one root's units. In chunks that costs nothing as long as
    no graph has them in it."""

    def __init__(self, backward: Backward) -> None:
        self._backward, self._units = backward, backward.engine.units
        self._watched: list[object] = [None] * len(self._units)  # of each unit, its shard
        self._nodes: list[list[Node]] = [[] for _ in self._units]
        self._without: list[FeaturedUnit] = []  # units that got no gradient in the last backward
        self._warned = set[FeaturedUnit]()
        self._backwards = 0

    def start(self, purpose: Purpose) -> None:
        """Watch what was moved or thawed since the last step, too."""
        for at, unit in enumerate(self._units):
            shard = unit.sharded_flat_param
            if self._watched[at] is not shard and unit.mesh is None and shard.requires_grad:
                self._watched[at], self._nodes[at] = shard, self._watch(unit)

    def start_backward(self, call: Call | None) -> None:
        """Watch rows, if a graph has them."""
        if self._backwards < CHECKED_STEPS:
            for unit in self._units:
                if unit.mesh is not None:
                    self._watch(unit)

    @torch.inference_mode(False)  # or there would be no graph
    def _watch(self, unit: FeaturedUnit) -> list[Node]:
        trained = [param for param in unit.optimized_params if param.requires_grad]
        # The view is for its node. A DTensor would take milliseconds to find out what that view is.
        with torch._C._DisableTorchDispatch():
            nodes = [get_gradient_edge(param).node for param in trained]
        for node in nodes:
            node.register_prehook(_hook(self, unit))
        return nodes

    def came(self, unit: FeaturedUnit, grad: Tensor | None) -> None:
        """A backward has come to a sharded parameter.

        Args:
            grad: for it; None from a Function that has none.

        Raises:
            RuntimeError: a Function has asked for it, and got none.
        """
        running, state = self._backward.running, unit.state
        waits = state.training is TrainingState.PRE_BACKWARD if running else unit in self._without
        # autograd numbers backwards as they begin: the unit's is one inside of this one.
        inside = state.graph_task > torch._C._current_graph_task_id()
        if waits and inside and (grad is None or not local_of(grad).any()):
            raise RuntimeError(_no_gradient(unit))
        is_part = unit.mesh is None and unit.shard_world_size > 1
        if grad is not None and is_part and unit not in self._warned:
            self._warned.add(unit)
            _warn(unit)

    def end_of_backward(self) -> None:
        """Note who got no gradient: an inner backward is over before the outer comes to shards."""
        self._backwards += 1
        began = TrainingState.PRE_BACKWARD
        self._without = [unit for unit in self._units if unit.state.training is began]

    def reset(self) -> None:
        """Nothing is known of the next step."""
        self._without = []


def _hook(layer: ParamsInGraphs, unit: FeaturedUnit) -> Callable[[Sequence[Any]], None]:
    """What autograd calls. It must keep neither of them alive: a dropped graph may stay."""
    weak, weak_unit = ref(layer), ref(unit)

    def hook(grads: Sequence[Any]) -> None:
        layer, unit = weak(), weak_unit()
        if layer is not None and unit is not None:
            layer.came(unit, grads[0])

    return hook


def _no_gradient(unit: FeaturedUnit) -> str:
    return (
        f"the parameters of unit {unit.label} would get no gradient. An autograd.Function was "
        f"given what its module lists in parameters(), as in Checkpoint.apply(block, x, "
        f"*block.parameters()). Outside of the unit's forward that is what is sharded. The "
        f"Function runs the unit again in its backward, which computes with unsharded parameters, "
        f"and asks for gradients of the others, of which there are none. Call the Function in the "
        f"forward of the unit, where parameters() lists what it computes with: wrap the module "
        f"around it, and not this one. Or let the Function call torch.autograd.backward, which "
        f"reaches all parameters; or use torch.utils.checkpoint, or an ODE solver without the "
        f"adjoint method."
    )


def _warn(unit: FeaturedUnit) -> None:
    warnings.warn(
        f"a loss was computed with the flat parameter of unit {unit.label} itself, of which each "
        f"rank has a shard: a penalty on model.parameters(), say. The loss counts this rank's "
        f"shard only. The gradients are right for a sum over elements, and wrong for a norm or a "
        f"mean. Compute it from the module's own parameters, in the forward of the model.",
        stacklevel=4,
    )

"""Room for a unit's whole parameters: a tensor whose memory comes and goes.

Gradients arrive at this tensor, and the layers compute with views of it, which share its *storage*.
So the tensor stays, and its storage shrinks to nothing and grows again. Gathering into the same
storage brings the views back to life; a new tensor would leave them pointing at nothing.

There is one for each dtype that the unit is computed in: mixed precision may be for training only.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import Node

from minifsdp.support.autograd_hooks import when_complete


@dataclass(eq=False)
class Full:
    """Room for all chunks of a unit, in one dtype."""

    leaf: Tensor  # [n * ranks]: what autograd knows; views of it are what the layers compute with
    buffer: Tensor  # the same memory, for collectives to write to
    transient: bool  # its storage comes and goes; otherwise it is the chunk's own
    accumulator: Node | None  # where autograd puts its gradient, if it gets one

    def __post_init__(self) -> None:
        self.storage = self.buffer.untyped_storage()

    def allocate(self) -> None:
        """Have memory for all chunks."""
        self.storage.resize_(self.buffer.numel() * self.buffer.itemsize)

    def release(self, views: list[Tensor]) -> bool:
        """Give the memory back, unless somebody else still refers to it.

        A parameter may have left its module: as an output, in an attribute, in a closure. Whoever
        has it keeps the memory, with the values of this step, and ``leaf`` gets a new storage.
        Otherwise a use of it would read memory that is not there, and take the process down.

        Args:
            views: the engine's own; emptied, if somebody else has one of them.

        Returns:
            Whether the memory is free now.
        """
        if any(count > _ALONE for count in _references(views)):
            views.clear()  # to see whether that is still so
        ours = 3 + len(views)  # ``leaf``, ``buffer``, ``storage``; all else is somebody's
        if torch._C._storage_Use_Count(self.storage._cdata) <= ours:
            self.storage.resize_(0)
            return True
        with torch.inference_mode(False):
            room = torch.empty_like(self.buffer)
        self.leaf.data, self.buffer.data = room, room
        self.storage = room.untyped_storage()
        self.storage.resize_(0)
        return False


class Fulls:
    """Those of one unit, made when they are needed: till then the module may move.

    Args:
        on_gradient: the unit's method to call when the gradient of one of them is complete.
    """

    def __init__(self, on_gradient: Callable[[], None]) -> None:
        self._on_gradient = _weakly(on_gradient)
        self._made: dict[torch.dtype, Full] = {}

    def get(self, dtype: torch.dtype, requires_grad: bool) -> Full | None:
        """The one of this dtype, unless it was made for parameters that were frozen since, or were
        frozen then."""
        full = self._made.get(dtype)
        return None if full is None or full.leaf.requires_grad != requires_grad else full

    def of(self, leaf: Tensor | None) -> Full | None:
        """The one that has this leaf, if it is still there."""
        return next((full for full in self._made.values() if full.leaf is leaf), None)

    def forget(self) -> None:
        """The parameters are elsewhere now."""
        self._made.clear()

    @property
    def accumulators(self) -> list[Node]:
        """Where autograd would put a gradient of the unit."""
        return [full.accumulator for full in self._made.values() if full.accumulator is not None]

    def add(self, data: Tensor, requires_grad: bool, transient: bool) -> Full:
        """Make one of ``data``, ``[n * ranks]``, which nobody else has, or the chunk itself. Not to
        be called in inference mode, which it would not outlive."""
        leaf = data.requires_grad_(requires_grad)
        accumulator = when_complete(leaf, self._on_gradient) if requires_grad else None
        # The same memory with a version counter of its own. Collectives write here: written through
        # the leaf, they would look to autograd like a modification of what the forward has saved.
        self._made[leaf.dtype] = full = Full(leaf, leaf.data, transient, accumulator)
        if transient:
            full.storage.resize_(0)
        return full


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Autograd owns its hooks for as long as a graph lives. They must not keep the unit alive."""
    alive = WeakMethod(method)

    def call() -> None:
        found = alive()
        if found is not None:
            found()

    return call


def _references(items: list[Tensor]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


_ALONE = _references([torch.empty(0)])[0]  # of what only the list has; differs by version of Python

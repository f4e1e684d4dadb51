"""The unsharded flat parameter: a tensor whose memory comes and goes.

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
class UnshardedFlatParam:
    """The shards of all ranks, in rank order, in one dtype.

    Attributes:
        flat_param: ``[padded_numel]``, a leaf of the graph. The layers compute with views of it.
        data: the same memory with a version counter of its own. Collectives write here: written
            through ``flat_param``, they would look to autograd like a modification of what the
            forward has saved.
        needs_unshard: its memory comes and goes. Otherwise it is that of the shard, which is all
            there is (NO_SHARD).
        grad_accumulator: autograd's node that puts the gradient into ``flat_param.grad``; None if
            the unit is frozen.
    """

    flat_param: Tensor
    data: Tensor
    needs_unshard: bool
    grad_accumulator: Node | None

    def __post_init__(self) -> None:
        self.storage = self.data.untyped_storage()
        self.dtype = self.data.dtype
        self.nbytes = self.data.numel() * self.data.itemsize

    def allocate(self) -> None:
        """Have memory for the shards of all ranks."""
        self.storage.resize_(self.nbytes)

    def release(self, views: list[Tensor]) -> bool:
        """Give the memory back, unless somebody else still refers to it.

        A parameter may have left its module: as an output, in an attribute, in a closure. Whoever
        has it keeps the memory, with the values of this step, and ``flat_param`` gets a new
        storage. Otherwise a use of it would read memory that is not there, and end the process.

        Args:
            views: the engine's own; emptied, if somebody else has one of them.

        Returns:
            Whether the memory is free now.
        """
        if any(count > _ALONE for count in _references(views)):
            views.clear()  # to see whether that is still so
        ours = 3 + len(views)  # ``flat_param``, ``data``, ``storage``
        if torch._C._storage_Use_Count(self.storage._cdata) <= ours:
            self.storage.resize_(0)
            return True
        with torch.inference_mode(False):
            memory = torch.empty_like(self.data)
        self.flat_param.data, self.data.data = memory, memory
        self.storage = memory.untyped_storage()
        self.storage.resize_(0)
        return False


class UnshardedFlatParams:
    """Those of one unit, by dtype. Each is made when it is first needed: till then the module may
    move to another device.

    Args:
        on_gradient: the unit's method to call when the gradient of one of them is complete.
    """

    def __init__(self, on_gradient: Callable[[], None]) -> None:
        self._on_gradient = _weakly(on_gradient)
        self._made: dict[torch.dtype, UnshardedFlatParam] = {}

    def get(self, dtype: torch.dtype, requires_grad: bool) -> UnshardedFlatParam | None:
        """The one of this dtype, unless the parameters were frozen or thawed since it was made."""
        made = self._made.get(dtype)
        return None if made is None or made.flat_param.requires_grad != requires_grad else made

    def __contains__(self, unsharded: UnshardedFlatParam) -> bool:
        """Whether it is still in use: the parameters were not moved, cast or thawed since."""
        return any(made is unsharded for made in self._made.values())

    def forget(self) -> None:
        """The parameters have been moved or cast."""
        self._made.clear()

    @property
    def grad_accumulators(self) -> list[Node]:
        """Where autograd would put a gradient of the unit."""
        nodes = (made.grad_accumulator for made in self._made.values())
        return [node for node in nodes if node is not None]

    def add(self, data: Tensor, requires_grad: bool, needs_unshard: bool) -> UnshardedFlatParam:
        """Make one of ``data``, ``[padded_numel]``, which nobody else has, or of the shard itself.
        Not to be called in inference mode, which it would not outlive."""
        leaf = data.requires_grad_(requires_grad)
        node = when_complete(leaf, self._on_gradient) if requires_grad else None
        self._made[leaf.dtype] = made = UnshardedFlatParam(leaf, leaf.data, needs_unshard, node)
        if needs_unshard:
            made.storage.resize_(0)
        return made


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

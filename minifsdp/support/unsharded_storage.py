"""The unsharded flat parameter: a tensor whose memory is allocated and freed in every step.

The layers compute with views of this tensor, and the gradients of the views arrive at it. The views
share its *storage*. So the tensor stays for good, and its storage is resized::

    SHARDED      flat_param [padded_numel], storage of 0 bytes        views without values
    UNSHARDED    the same tensor, storage of all bytes, gathered      the same views, with values

A new tensor for every gather would leave the views without memory, and autograd with a graph that
ends at an old tensor.

A unit has one for each dtype that it is computed in: mixed precision may be for training only.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node

from minifsdp.support.autograd_hooks import when_complete
from minifsdp.support.freed_memory import keep_freed_memory


@dataclass(eq=False, repr=False)  # to print tensors whose memory is freed ends the process
class UnshardedFlatParam:
    """The shards of all ranks, in rank order, in one dtype.

    Attributes:
        flat_param: ``[padded_numel]``, a leaf of the graph. The layers compute with views of it. In
            a unit that is frozen in part it is the part that is not.
        data: the same memory with a version counter of its own. Collectives write here: through
            ``flat_param`` they would look to autograd like an in-place change of what the forward
            has saved.
        needs_unshard: its memory is allocated and freed. False: it has the memory of the shard,
            which is the whole parameter (NO_SHARD).
        grad_accumulator: autograd's node that a backward comes to last in this unit; None if the
            unit is frozen.
        frozen: the rest of the memory, if the unit is frozen in part (rows.py).
        saved: one object, a new one for each graph. All that autograd has saved of the parameters
            in the last graph refers to it (saved_tensors.py), so the references to it tell whether
            there is still something.
    """

    flat_param: Tensor
    data: Tensor
    needs_unshard: bool
    grad_accumulator: Node | None
    frozen: Tensor | None = None

    def __post_init__(self) -> None:
        self.storage = self.data.untyped_storage()
        self.dtype = self.data.dtype
        self.nbytes = self.data.numel() * self.data.itemsize
        self.saved = [object()]

    @property
    def is_saved(self) -> bool:
        """Whether the backward will come to an operation that has saved a parameter. One that an
        activation checkpoint runs again has saved none."""
        return _reference_counts(self.saved)[0] > _ONE_REFERENCE

    def allocate(self) -> None:
        """Get memory for the shards of all ranks. It has no values yet."""
        self.storage.resize_(self.nbytes)

    def is_in_use(self, views: list[Tensor]) -> bool:
        """Whether something outside of the engine refers to the memory, or to a view of it: a
        program, or autograd if it has saved a view as it is.

        Args:
            views: the engine's own.
        """
        if max(_reference_counts(views), default=0) > _ONE_REFERENCE:
            return True
        # ``flat_param``, ``data``, ``storage``, and perhaps ``frozen``
        ours = 3 + (self.frozen is not None) + len(views)
        return torch._C._storage_Use_Count(self.storage._cdata) > ours

    def release(self, views: list[Tensor]) -> bool:
        """Free the memory, unless something outside of the engine still refers to it.

        A view may have left its module: as an output, in an attribute, in a closure. Then that view
        keeps this memory, with the values of this step, and ``flat_param`` gets a new storage.
        Without that a use of the view would read freed memory and crash the process.

        Args:
            views: the engine's own.

        Returns:
            Whether the memory is free now.
        """
        if not self.is_in_use(views):
            self.storage.resize_(0)
            return True
        with torch.inference_mode(False):
            memory = torch.empty_like(self.data)
        trained = self.flat_param.numel()
        self.flat_param.data, self.data.data = memory[:trained], memory
        if self.frozen is not None:
            self.frozen.data = memory[trained:]
        self.storage = memory.untyped_storage()
        self.storage.resize_(0)
        return False


class UnshardedFlatParams:
    """The unsharded flat parameters of one unit, by dtype. Each is made when it is first needed:
    until then the module may be moved to another device.

    Attributes:
        on_gradient: called when the gradient of one of them is complete.
    """

    def __init__(self) -> None:
        self.on_gradient: Callable[[], None] = lambda: None
        self._made: dict[torch.dtype, UnshardedFlatParam] = {}

    def get(self, dtype: torch.dtype, requires_grad: bool) -> UnshardedFlatParam | None:
        """The one of this dtype; None if there is none, or if ``requires_grad`` was changed since:
        a leaf that a graph was recorded with cannot change that."""
        made = self._made.get(dtype)
        return None if made is None or made.flat_param.requires_grad != requires_grad else made

    def __contains__(self, unsharded: UnshardedFlatParam) -> bool:
        """Whether it is still in use: the parameters were not moved, cast or frozen since."""
        return any(made is unsharded for made in self._made.values())

    def forget(self) -> None:
        """Drop all of them: the parameters have been moved or cast."""
        self._made.clear()

    @property
    def grad_accumulators(self) -> list[Node]:
        """The nodes of autograd that would write a gradient of the unit."""
        nodes = (made.grad_accumulator for made in self._made.values())
        return [node for node in nodes if node is not None]

    def add(
        self, data: Tensor, requires_grad: bool, needs_unshard: bool, trained_numel: int
    ) -> UnshardedFlatParam:
        """Make one and keep it. Inference mode has to be off: autograd refuses such tensors later.

        Args:
            data: ``[padded_numel]``, a new tensor or the shard itself, in the dtype to compute in.
            trained_numel: how many of its elements, from the first on, can have a gradient.
        """
        # ``.data`` makes a tensor of its own. As views they would hold one more reference to the
        # memory, and release() would take it for somebody else's.
        leaf, rest = data[:trained_numel].data, data[trained_numel:].data
        leaf.requires_grad_(requires_grad)
        frozen = rest if len(rest) else None
        node = when_complete(leaf, self._hook()) if requires_grad else None
        made = UnshardedFlatParam(leaf, data.data, needs_unshard, node, frozen)
        self._made[leaf.dtype] = made
        if needs_unshard:
            made.storage.resize_(0)
        if data.device.type == "cpu":
            keep_freed_memory(made, made.nbytes)  # also where only gradients come and go
        return made

    def _hook(self) -> Callable[[], None]:
        weak = ref(self)  # autograd keeps a hook as long as a graph, and must not keep the unit

        def hook() -> None:
            found = weak()
            if found is not None:
                found.on_gradient()

        return hook


def _reference_counts(items: Sequence[object]) -> list[int]:
    return [sys.getrefcount(item) for item in items]


# The count of an item that only a list refers to, which differs between versions of Python.
_ONE_REFERENCE = _reference_counts([torch.empty(0)])[0]

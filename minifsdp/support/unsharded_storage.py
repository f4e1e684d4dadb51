"""An unsharded flat parameter of which others may have views, and several of them for one unit.

core/storage.py says what it is. Here its memory is freed only if nobody else refers to it: a view
may have left its module, and a use of that view would read freed memory and crash the process. And
a unit has one for each dtype that it computes in: mixed precision may be for training only.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from minifsdp.core.autograd_hooks import when_complete
from minifsdp.core.storage import UnshardedFlatParam
from minifsdp.support.dtensors import local_of
from minifsdp.support.freed_memory import keep_freed_memory


@dataclass(eq=False, repr=False)  # to print tensors whose memory is freed ends the process
class FeaturedFlatParam(UnshardedFlatParam):
    """The unsharded flat parameter in one dtype.

    Attributes:
        frozen: the rest of the memory, if the unit is frozen in part (rows.py): then ``flat_param``
            is the part that is trained.
        layout: where the parameters are in it (core/shard.py, rows.py); None until it is used.
        saved: one object, a new one for each graph. All that autograd has saved of the parameters
            in the last graph refers to it (saved_tensors.py), so the references to it tell whether
            anything is still saved.
        arrived: gradients of its pieces that a backward has computed and nobody has taken yet
            (piece_views.py). Not in the ``view_maker``, because a unit gets a new one if a program
            chooses settings between a forward and its backward.
        used: of the parameters with a gradient that nobody has taken yet, the positions in
            ``layout.with_grad`` (marked_views.py).
    """

    frozen: Tensor | None = None
    layout: Any = None
    arrived: list[Tensor | None] | None = None
    used: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dtypes = {self.dtype, *getattr(self.layout, "dtypes", ())}  # of the views
        self.saved = [object()]

    @property
    def is_saved(self) -> bool:
        """Whether the backward will come to an operation that has saved a parameter. Those that an
        activation checkpoint runs again have saved none."""
        return max(map(sys.getrefcount, self.saved)) > _ONE_REFERENCE

    def is_in_use(self, views: list[Tensor]) -> bool:
        """Whether something outside of the engine refers to the memory, or to a view of it: a
        program, or autograd if it has saved a view as it is.

        Args:
            views: the engine's own.
        """
        if max(map(sys.getrefcount, views), default=0) > _ONE_REFERENCE:
            return True
        if DTensor in map(type, views):
            # In no_grad, to_local() of a DTensor returns the very tensor that it refers to.
            parts = [local_of(view) for view in views if type(view) is DTensor]
            if max(map(sys.getrefcount, parts)) > _ONE_REFERENCE + 1:
                return True
        # ``flat_param``, ``data``, ``storage``, and perhaps ``frozen``
        ours = 3 + (self.frozen is not None) + len(views)
        return torch._C._storage_Use_Count(self.storage._cdata) > ours

    def release(self, views: list[Tensor]) -> bool:
        """Free the memory, unless something outside of the engine still refers to it.

        A view may have left its module: as an output, in an attribute, in a closure, as an array of
        NumPy's. Then that view keeps this memory, with the values of this step, and ``flat_param``
        gets a new storage. Otherwise a use of the view would read freed memory and crash the
        process.

        Args:
            views: the engine's own.

        Returns:
            Whether the memory is free now.
        """
        if not self.is_in_use(views):
            try:
                self.free()
            except RuntimeError:  # torch frees no memory that NumPy has seen
                pass
            else:
                return True
        with torch.inference_mode(False):
            memory = torch.empty_like(self.data)
        trained = self.flat_param.numel()
        self.flat_param.data, self.data.data = memory[:trained], memory
        if self.frozen is not None:
            self.frozen.data = memory[trained:]
        self.storage = memory.untyped_storage()
        self.free()
        return False


class UnshardedFlatParams:
    """The unsharded flat parameters of one unit, by dtype. Each is made when it is first needed:
    until then the module may be moved to another device.

    Args:
        on_gradient: called when the gradient of one of them is complete. Must not keep the unit.

    Attributes:
        grad_accumulators: the nodes of autograd that would write a gradient of the unit.
    """

    def __init__(self, on_gradient: Callable[..., None]) -> None:
        self._on_gradient = on_gradient
        self._made: dict[tuple[torch.dtype, object], FeaturedFlatParam] = {}
        self.grad_accumulators: list[Node] = []

    def get(
        self, dtype: torch.dtype, requires_grad: bool, layout: object
    ) -> FeaturedFlatParam | None:
        """The one of this dtype and layout; None if there is none, or if ``requires_grad`` has
        changed since: it cannot be changed on a leaf that a graph was recorded with."""
        made = self._made.get((dtype, layout))
        return None if made is None or made.flat_param.requires_grad != requires_grad else made

    def __contains__(self, unsharded: FeaturedFlatParam) -> bool:
        """Whether it is still in use: the parameters were not moved, cast or frozen since."""
        return any(made is unsharded for made in self._made.values())

    def has_storage(self, address: int) -> bool:
        """Whether one that is still in use has the storage at ``address``. (The storage that once
        had this address may be gone.)"""
        return any(made.storage._cdata == address for made in self._made.values())

    def forget(self) -> None:
        """Drop all of them: the parameters have been moved or cast."""
        self._made.clear()
        self.grad_accumulators = []

    def add(
        self, data: Tensor, requires_grad: bool, needs_unshard: bool, layout: Any
    ) -> FeaturedFlatParam:
        """Make one and keep it. Inference mode has to be off: autograd would refuse its tensors.

        Args:
            data: ``[padded_numel]``, a new tensor or the shard itself, in the dtype to compute in.
            layout: where the parameters are in it.
        """
        # ``.data`` makes a tensor that is no view. A view would hold one more reference to the
        # memory, and release() would take that for somebody else's.
        leaf, rest = data[: layout.trained_numel].data, data[layout.trained_numel :].data
        leaf.requires_grad = requires_grad  # torch.func.vmap refuses requires_grad_()
        frozen = rest if len(rest) else None
        node = when_complete(leaf, self._on_gradient) if requires_grad else None
        made = FeaturedFlatParam(leaf, data.data, needs_unshard, node, frozen, layout)
        self._made[leaf.dtype, layout] = made
        nodes = (made.grad_accumulator for made in self._made.values())
        self.grad_accumulators = [node for node in nodes if node is not None]
        if needs_unshard:
            made.free()
        if data.device.type == "cpu":
            keep_freed_memory(made, made.nbytes)  # also where only gradients come and go
        return made


# The count of an item that only a list refers to, asked for as above: the question itself takes
# references, in a number that differs between versions of Python.
_ONE_REFERENCE = max(map(sys.getrefcount, [torch.empty(0)]))

"""What autograd saves of a unit's parameters: a note in place of the memory.

A forward saves tensors for its backward, and some are parameters: a linear layer needs its weight
for the gradient of its input. Between the two the unit is sharded, so there is nothing to point to.
PyTorch's saved-tensor hooks let us keep a note instead, and act when autograd asks for the tensor::

    forward     weight --pack--> note: unit, shape, strides, offset
    backward    note --unpack--> gather the unit, wait for it, a view of the gathered memory

So a parameter is there whenever a backward needs it, by whatever path the gradient has come: from
an output of the module, from a view that was changed in place, from a loss that the module has kept
in an attribute. Without these hooks only the first of them would be known in time.

All other tensors are saved as ever. Hooks replace autograd's own check that nobody has changed them
since, so that check is here. Hooks that somebody else has set (activation checkpointing, offloading
of activations) get what they would have got; for a parameter they get a tensor that looks like it.

Source: "Hooks for autograd saved tensors", PyTorch tutorials; torch.autograd.graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from minifsdp.support.param_views import Values
from minifsdp.support.unsharded_storage import UnshardedFlatParam
from minifsdp.unit import Unit
from minifsdp.unit_state import TrainingState

Hook = Callable[[Any], Any]


class Call(NamedTuple):
    """One forward of a unit, and what its backward has to find again."""

    unit: Unit
    unsharded: UnshardedFlatParam  # whose views it computed with
    version: int  # of the shard
    values: Values  # of ``full``, when the forward began
    training: bool | None  # the mode of the outermost module


Chain = tuple[Call, ...]
"""A call inside of others, outermost first."""


class Note(NamedTuple):
    """How to find a saved parameter again."""

    owner: "SavedParameters"
    chain: Chain
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any  # elements
    theirs: object  # what the hooks around ours have made of a tensor that looks like it


class SavedParameters:
    """The saved-tensor hooks of one root's units.

    Args:
        before_use: called in a backward with the chain of a saved parameter, to gather its unit.
    """

    def __init__(self, before_use: Callable[[Chain], None]) -> None:
        self.before_use = before_use
        self._chains: dict[int, Chain] = {}  # by the address of a storage
        self.last: dict[Unit, Chain] = {}  # the last call of each unit
        self._alone = _Hooks(self, None)

    def uses(self, chain: Chain) -> None:
        """The unit of the last call is computed with from now on."""
        unit = chain[-1].unit
        self._chains[unit.unsharded.storage._cdata] = self.last[unit] = chain

    def chain_of(self, tensor: Tensor) -> Chain | None:
        """The call whose gathered parameters ``tensor`` is a part of, if it is one."""
        address = tensor.untyped_storage()._cdata
        chain = self._chains.get(address)
        # A unit that had to leave its memory to somebody has other memory now; the address of the
        # old one may be anybody's.
        if chain is None or chain[-1].unit.unsharded.storage._cdata != address:
            return None
        return chain

    def hooks(self) -> AbstractContextManager[object]:
        """Around a forward. Nothing, if they are set already by a forward around this one."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            if not torch._C._autograd._saved_tensors_hooks_is_enabled():
                return _NOTHING  # inside of torch.func, which refuses them
            return self._alone
        owner = getattr(outer[0], "__self__", None)
        if isinstance(owner, _Hooks) and owner.saved is self:
            return _NOTHING
        return _Hooks(self, outer)


def refuse_transforms(unit: Unit, error: RuntimeError) -> None:
    """Say by name what torch refuses in general: torch.func where saved-tensor hooks are set.

    Raises:
        RuntimeError: ``error`` is torch's.
    """
    if "saved tensor hooks" in str(error):
        raise RuntimeError(
            f"a transform of torch.func was called in the forward of unit {unit.label}. torch has "
            f"none of them where saved-tensor hooks are set, which is so in a sharded model and in "
            f"an activation checkpoint. Use torch.autograd.grad there, which works."
        ) from error


_NOTHING = nullcontext()


class _Hooks(saved_tensors_hooks):
    """One pair of hooks, which knows the pair around it."""

    def __init__(self, saved: SavedParameters, outer: tuple[Hook, Hook] | None) -> None:
        super().__init__(self.pack, self.unpack)
        self.saved, self.outer = saved, outer

    def pack(self, tensor: Tensor) -> object:
        chain = self.saved.chain_of(tensor)
        # A number type that is not the parameter's, or a flag for "conjugate", is not in a note.
        # Such a tensor is saved itself, and keeps the memory alive (see
        # UnshardedFlatParam.release).
        if chain is None or tensor.dtype is not chain[-1].unsharded.dtype or tensor.is_conj():
            if self.outer is not None:
                return self.outer[0](tensor)
            return tensor, tensor._version
        theirs = None
        if self.outer is not None:
            theirs = self.outer[0](tensor.new_empty(()).expand(tensor.shape))
        return Note(
            self.saved, chain, tensor.shape, tensor.stride(), tensor.storage_offset(), theirs
        )

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Note) and saved.owner is self.saved:
            if self.outer is not None:
                self.outer[1](saved.theirs)  # a checkpoint computes anew here
            unit = saved.chain[-1].unit
            if (
                unit.state.training is not TrainingState.PRE_BACKWARD
                or unit.state.graph_task != torch._C._current_graph_task_id()
            ):
                self.saved.before_use(saved.chain)
            memory = unit.unsharded.data
            if torch.is_grad_enabled():
                # This backward is recorded, and saves the tensor once more, for as long as its own
                # graph lives. The next gather has other memory then (see
                # UnshardedFlatParam.release), so it must not count as a change of this one.
                memory = memory.data
            return memory.as_strided(saved.shape, saved.stride, saved.offset)
        if self.outer is not None:
            found: Tensor = self.outer[1](saved)
            return found
        tensor: Tensor = saved[0]
        if tensor._version != saved[1]:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {saved[1]} instead. Hint: enable anomaly "
                f"detection to find the operation that failed to compute its gradient, with "
                f"torch.autograd.set_detect_anomaly(True)."
            )
        return tensor

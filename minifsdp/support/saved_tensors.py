"""What autograd saves of a unit's parameters: where to find them again, and not their memory.

A forward saves tensors for its backward, and some of them are parameters: a linear layer needs its
weight for the gradient of its input. Between forward and backward the unit is sharded, so the
memory of the parameter is freed. PyTorch's saved-tensor hooks let us save a description instead,
and act when autograd asks for the tensor::

    forward     weight --pack--> PackedParameter: unit, shape, strides, offset
    backward    PackedParameter --unpack--> unshard the unit, wait for it, a view of its memory

So a parameter is there whenever a backward needs it, however the gradient has come to that
operation: from an output of the module, from a view that was changed in place, from a loss that the
module keeps in an attribute. Without these hooks only an output would be known in time.

All other tensors are saved as usual, but detached: an operation may save its own output, which
refers to the operation, and no collector would find that cycle. Where hooks are set, autograd does
not check by itself that a saved tensor was not changed since, so the check is here. Other hooks
that are set around ours (activation checkpointing, offloading of activations) get what they would
have got without ours; in place of a parameter they get a tensor of its shape without its memory.

Source: "Hooks for autograd saved tensors", PyTorch tutorials; torch.autograd.graph.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from minifsdp.core.layers import Call, Chain
from minifsdp.core.unit_state import TrainingState
from minifsdp.dispatch_modes import never_compile_inside, without_modes
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.dtensors import distributed

Hook = Callable[[Any], Any]


class PackedParameter(NamedTuple):
    """What autograd saves in place of a parameter, or of a view of one."""

    owner: "SavedParameters"
    chain: Chain
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any  # in the unsharded flat parameter, in elements
    dtype: torch.dtype
    outer: object  # what the hooks around ours have packed for a tensor of its shape
    token: object  # while there is a reference to it, autograd has something saved of the unit
    spec: DTensorSpec | None  # of a DTensor, whose part on this rank the rest is about


class SavedParameters:
    """The saved-tensor hooks of one root's units.

    Args:
        before_use: called in a backward with the chain of a saved parameter, to unshard its unit.

    Attributes:
        last: the last call of each unit.
        began: of each unit the call that the backward has come to last.
    """

    def __init__(self, before_use: Callable[[Chain], None]) -> None:
        self.before_use = before_use
        self._chains: dict[int, Chain] = {}  # by the address of the unsharded storage
        self.last: dict[FeaturedUnit, Chain] = {}
        self.began: dict[FeaturedUnit, Call] = {}
        self._without_outer = _Hooks(self, None)

    def chain_of(self, tensor: Tensor) -> Chain | None:
        """The call whose unsharded parameters ``tensor`` shares memory with, if there is one."""
        if tensor.layout is not torch.strided:
            return None  # a sparse tensor has no storage
        address = tensor.untyped_storage()._cdata
        if address not in self._chains:
            return None
        chain = self._chains[address]
        # A unit that could not free its memory has a new storage (FeaturedFlatParam.release), and
        # the address of the old one may by now be that of any other tensor.
        return chain if chain[-1].unit.unsharded.storage._cdata == address else None

    def hooks(self, chain: Chain) -> AbstractContextManager[object]:
        """A context for the forward of the chain's last call, whose unit is computed with from now
        on. It does nothing if a forward around this one has set the hooks."""
        call = chain[-1]
        address = call.unit.unsharded.storage._cdata
        if address not in self._chains and len(self._chains) > 2 * len(self.last):
            # Units have got new memory. Nobody will ask for the old addresses again.
            self._chains = {
                old: last
                for old, last in self._chains.items()
                if last[-1].unit.unsharded_by_dtype.has_storage(old)
            }
        self._chains[address] = self.last[call.unit] = chain
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            if not torch._C._autograd._saved_tensors_hooks_is_enabled():
                return _NOTHING  # inside of torch.func, which refuses them
            return self._without_outer
        if type(outer[0]) is _Pack and outer[0].saved is self:
            return _NOTHING
        if _runs_again(call.module):
            return _NOTHING
        return _Hooks(self, outer)


def _runs_again(module: nn.Module) -> bool:
    """Whether a composable checkpoint of ``module`` itself runs it for the second time. Such a
    checkpoint is a hook of the module, so in the forward its saved-tensor hooks were inside of
    ours. Now they are around ours, and would hand autograd a tensor without values."""
    state: Any = checkpoint.state(module)
    return state is not None and not state.enable_hook


_NOTHING = nullcontext()


_detached = without_modes(Tensor.detach)
"""The tensor without the operation that computed it, which autograd restores by itself; with the
same version counter."""
_view = without_modes(Tensor.as_strided)


@without_modes
def _lookalike(tensor: Tensor) -> Tensor:
    return tensor.new_empty(()).expand(tensor.shape)


class _Pack:
    """The hooks to save a tensor and to read it. They call those around them, since torch calls the
    innermost only."""

    # By this name torch's selective checkpoints (2.14) know hooks of an engine, and look for the
    # user's hooks behind them. Otherwise they would hand us what they keep themselves, and warn.
    _checkpoint_internal = True

    def __init__(self, saved: SavedParameters, outer: tuple[Hook, Hook] | None) -> None:
        self.saved, self.outer = saved, outer

    @property
    def _user_hooks(self) -> tuple[Hook, Hook] | None:
        outer: Any = self.outer
        while outer is not None and getattr(outer[0], "_checkpoint_internal", False):
            outer = outer[0]._user_hooks
        return outer  # type: ignore[no-any-return]

    @never_compile_inside
    def __call__(self, tensor: Tensor) -> object:
        local, spec = tensor, None
        if type(tensor) is DTensor:
            local, spec = tensor._local_tensor, tensor._spec
        chain = self.saved.chain_of(local)
        # A PackedParameter has the dtype of a parameter, which `weight.view(dtype)` may not have,
        # and no conjugate flag. Any other tensor is saved itself, which keeps its memory alive (see
        # FeaturedFlatParam.release).
        if chain is None or tensor.dtype not in chain[-1].unsharded.dtypes or tensor.is_conj():
            if self.outer is not None:
                return self.outer[0](tensor)
            return _detached(tensor), tensor._version
        outer: Any = None
        if self.outer is not None:
            outer = _lookalike(local)
            outer = self.outer[0](outer if spec is None else distributed(outer, spec))
        place = (local.shape, local.stride(), local.storage_offset(), local.dtype)
        token = chain[-1].unsharded.saved[0]
        return PackedParameter(self.saved, chain, *place, outer, token, spec)

    @never_compile_inside
    def unpack(self, saved: Any) -> Tensor:
        if type(saved) is PackedParameter and saved.owner is self.saved:
            if self.outer is not None:
                self.outer[1](saved.outer)  # a checkpoint recomputes its forward in this call
            call = saved.chain[-1]
            state = call.unit.state
            if (
                state.training is not TrainingState.PRE_BACKWARD
                or state.graph_task != torch._C._current_graph_task_id()
                or self.saved.began[call.unit] is not call
                or not call.unit.shows_views  # freed early: only the last graph was seen
            ):
                self.saved.before_use(saved.chain)
            memory = call.unit.unsharded.data
            if torch.is_grad_enabled():
                # This backward is recorded itself (create_graph=True). Its graph saves this tensor
                # once more, and keeps the memory. The next gather then writes to other memory (see
                # FeaturedFlatParam.release), but would count as a change of this tensor if they
                # shared a version counter.
                memory = memory.data
            if saved.dtype is not memory.dtype:
                memory = memory.view(saved.dtype)  # one of mixed_rows.py
            view = _view(memory, saved.shape, saved.stride, saved.offset)
            return view if saved.spec is None else distributed(view, saved.spec)
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


class _Hooks(saved_tensors_hooks):
    """One pair of hooks."""

    def __init__(self, saved: SavedParameters, outer: tuple[Hook, Hook] | None) -> None:
        pack = _Pack(saved, outer)
        # Not methods of this object, which refers to both. A dropped graph would wait for Python's
        # collector; and a checkpoint around the unit would stay for ever: it saves its input by a
        # graph that no collector knows.
        super().__init__(pack, pack.unpack)

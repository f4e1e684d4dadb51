"""What torch.distributed.checkpoint saves and loads of a model and its optimizers::

    dcp.save(state_to_save(model, optimizer), checkpoint_id=folder)     # or dcp.async_save

    with state_to_load(model, optimizer) as state:
        dcp.load(state, checkpoint_id=folder)

The state has the form that torch's ``get_state_dict`` gives a model of FSDP2: each tensor under the
name of its parameter, so that any model can load it, sharded in whichever way. Chunks are neither
gathered nor exchanged. torch's function finds the names for DTensors without memory, which stand
for them; then the boxes of the chunks (chunks/boxes.py) take the places of these DTensors::

    get_state_dict(...)     {"model": {"weight": DTensor [4, 5] on meta}, "optimizer": ...}
    state_to_save(...)      {"model": {"weight": BoxedTensor [4, 5]},     "optimizer": ...}

What is loaded goes into copies. They replace the model's own tensors when all has been read, so a
damaged file changes nothing. The states of an optimizer that has not stepped need no copies: they
were made for this load only, and are dropped if it fails.

With ``state_to_save(..., checksums=True)`` the checkpoint has a checksum of each tensor, which is
compared before anything is replaced (checksums.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map

from minifsdp.between_steps.checksums import KEY, StateToLoad, check
from minifsdp.between_steps.checksums import checksums as checksums_of
from minifsdp.chunks.as_dtensors import shown_as
from minifsdp.chunks.boxes import BoxedTensor, boxed
from minifsdp.chunks.optimizer_dtensors import make_states
from minifsdp.chunks.unit_dtensors import mesh_of_unit
from minifsdp.core.outputs import tensors_in
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.rows import local_shape
from minifsdp.support.dtensors import dtensor, local_of
from minifsdp.wrapping.module_tree import unit_of


def state_to_save(
    model: nn.Module, *optimizers: Optimizer, checksums: bool = False
) -> dict[str, Any]:
    """The state to be saved, now: the next step changes it, unless it has been written or copied
    (``dcp.async_save`` returns when it has a copy). Every rank has to call it.

    Args:
        model: a FullyShardedDataParallel, one with such modules inside, or one that fully_shard was
            given.
        optimizers: of ``model.parameters()``.
        checksums: add one of each tensor, under "checksums". Loading compares them. All elements
            are read for that, so it takes longer.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}``

    Raises:
        RuntimeError: as :func:`minifsdp.as_dtensors`; or ranks that should have the same values
            have different ones, which have no common checksum.
    """
    form = InPlace(Tensor.detach)
    with ExitStack() as undo:
        for optimizer in optimizers:
            if not optimizer.state:
                undo.callback(optimizer.state.clear)
                make_states(optimizer)
        undo.enter_context(shown_as(form, model, optimizers, writeback=False))
        state: dict[str, Any] = tree_map(form.boxed, _state(model, optimizers))
    if checksums:
        state[KEY] = checksums_of(state, _units(model))
    return state


@contextmanager
def state_to_load(model: nn.Module, *optimizers: Optimizer) -> Iterator[dict[str, Any]]:
    """The state to be loaded into. At the end of the block the model and the optimizers get its
    values. If an exception ends the block, nothing is changed. Every rank has to take part.

    Args, and what it yields: as :func:`state_to_save`. An optimizer that has not stepped gets its
    states first (:func:`make_states`).

    Raises:
        RuntimeError: as :func:`minifsdp.as_dtensors`, when the block begins or ends.
        ValueError: the optimizer that was saved has different groups of parameters; or a tensor
            does not have the checksum that was saved, if the checkpoint has checksums.
    """
    unused: set[int] = set()

    def copy(value: Tensor) -> Tensor:
        return value if _storage(value) in unused else value.clone()

    form = InPlace(copy)
    with ExitStack() as undo:
        for optimizer in optimizers:
            if not optimizer.state:
                undo.callback(optimizer.state.clear)
                make_states(optimizer)
                unused.update(map(_storage, tensors_in(list(optimizer.state.values()))))
        with torch.no_grad(), shown_as(form, model, optimizers, writeback=True):
            named = _state(model, optimizers)
            loaded = StateToLoad(tree_map(form.boxed, named))
            yield loaded
            if saved := loaded.pop(KEY, None):
                check(loaded, saved, _units(model))
            _check_groups(named["optimizer"], loaded["optimizer"])
            params, states = (
                tree_map(_named_again, named[part], loaded[part])
                for part in named  # a program may have added parts of its own
            )
            # Not strict: what no step has used has no state, neither here nor in the checkpoint.
            options = StateDictOptions(strict=False)
            set_state_dict(
                model, optimizers, model_state_dict=params, optim_state_dict=states, options=options
            )
        undo.pop_all()


def _check_groups(here: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Check that the optimizer that was saved has its parameters in the same groups as this one.

    Raises:
        ValueError: it does not.
    """
    pairs = zip(here.get("param_groups", []), loaded.get("param_groups", []), strict=True)
    for at, (own, found) in enumerate(pairs):
        if sorted(own["params"]) != sorted(found["params"]):
            raise ValueError(
                f"group {at} of the optimizer in the checkpoint has other parameters "
                f"({len(found['params'])}) than group {at} of this one ({len(own['params'])}). "
                f"Nothing was loaded. Make the optimizer with the groups that it had when it was "
                f"saved, or load the model alone: state_to_load(model)."
            )


def _named_again(named: Any, loaded: Any) -> Any:
    """What set_state_dict takes: in place of boxes the DTensor that stands for them."""
    return named if isinstance(loaded, BoxedTensor) else loaded


def _state(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, Any]:
    params, states = get_state_dict(model, optimizers)
    return {"model": dict(params), "optimizer": states}


def _units(model: nn.Module) -> list[FeaturedUnit]:
    found = (unit_of(module) for module in model.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _storage(value: Tensor) -> int:
    """The address of the storage of a tensor, or of this rank's part of a DTensor."""
    address: int = local_of(value).untyped_storage()._cdata
    return address


class InPlace:
    """DTensors that stand for chunks, and have no values.

    Args:
        own: returns what is saved or loaded in place of a tensor: the same tensor, or a copy.
    """

    copies = False

    def __init__(self, own: Any) -> None:
        self.own = own
        self._chunks: dict[tuple[FeaturedUnit, str], Tensor] = {}
        self._boxes: dict[int, BoxedTensor] = {}  # by the storage of the DTensor that stands for it
        self._storages: list[Any] = []  # so that no other one gets the same address

    def split(self, unit: FeaturedUnit, chunk: Tensor, name: str) -> list[DTensor]:
        chunk = self._chunks[unit, name] = self.own(chunk.detach())
        mesh, found = mesh_of_unit(unit), []
        for tensor in boxed(unit, chunk):
            shape = tensor.shape
            if shape:
                shape = local_shape(shape, unit.shard_rank, unit.shard_world_size)
            local = torch.empty(shape, dtype=chunk.dtype, device="meta")
            self._storages.append(local.untyped_storage())
            self._boxes[_storage(local)] = tensor
            found.append(dtensor(unit, mesh, tensor.shape, local))
        return found

    def join(self, unit: FeaturedUnit, dtensors: list[DTensor], name: str) -> Tensor:
        return self._chunks[unit, name]

    def boxed(self, value: Any) -> Any:
        """The boxes that a DTensor stands for; for any other tensor what ``own`` returns."""
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and value._local_tensor.is_meta:
            return self._boxes[_storage(value)]
        return self.own(value)

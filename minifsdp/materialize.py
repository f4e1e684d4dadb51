"""How parameters come to be, just before they are sharded.

A model too large for one machine must never exist whole. So it is built on the *meta* device, where
tensors have shapes and no memory, and each unit gets its memory, its values, and is cut to a chunk
before the next one gets any::

    meta      unit a: shapes         unit b: shapes
              a: memory, values -> chunk
                                     b: memory, values -> chunk

The most that a rank holds at a time is one whole unit, once more of it while it is laid end to end,
and chunks.

Values come from the modules themselves (``reset_parameters()``), or from the user's function, or
from rank 0, which sends them to the others (``sync_module_states``). In the first two cases each
rank draws its own, so give all ranks the same seed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.collectives import Group, broadcast, gather_objects
from minifsdp.tree import Modules, unit_of
from minifsdp.unit import Unit


class Place(NamedTuple):
    """Where a parameter or buffer is."""

    label: str
    tensors: dict[str, Any]  # its module's _parameters or _buffers
    name: str

    def get(self) -> Tensor:
        tensor: Tensor = self.tensors[self.name]
        return tensor

    def put(self, tensor: Tensor) -> None:
        self.tensors[self.name] = tensor


def _places(modules: Modules) -> list[Place]:
    return [
        Place(f"{prefix}.{name}" if prefix else name, tensors, name)
        for prefix, module in modules.items()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def materialize(
    modules: Modules, device: torch.device, init_fn: Callable[[nn.Module], None] | None
) -> None:
    """Give memory and values to what is on the meta device.

    Args:
        modules: of one unit, by name.
        device: where it should be.
        init_fn: called with each module that had something on the meta device, to set its own
            parameters and buffers, not those of its children; None: its ``reset_parameters()``.

    Raises:
        ValueError: there is no ``init_fn``, and a module has no ``reset_parameters``: nothing has
            been changed then. Or ``init_fn`` has changed another unit.
    """
    if device.type == "meta":
        return  # a virtual GPU, where nothing has values
    on_meta = {
        name: module
        for name, module in modules.items()
        if any(place.get().is_meta for place in _places({name: module}))
    }
    for name, module in on_meta.items():
        if init_fn is None and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {name or '<root>'!r} ({type(module).__name__}) is on the meta device and "
                f"has no reset_parameters() to give it values. Add that method, or pass "
                f"param_init_fn=, which is called with each such module."
            )
    copies = _give_memory(on_meta, device)
    _tie(copies)
    _give_values(on_meta, init_fn, _units_inside(modules))
    _tie(copies)  # again: an init_fn may have put new tensors in their places


def _give_memory(on_meta: Modules, device: torch.device) -> list[tuple[Place, Place]]:
    """Replace what is on the meta device. Returns where something is for another time, and where
    for the first."""
    made: dict[Tensor, Place] = {}
    copies: list[tuple[Place, Place]] = []
    for place in _places(on_meta):
        tensor = place.get()
        if not tensor.is_meta:
            continue
        if tensor in made:
            copies.append((place, made[tensor]))
            continue
        made[tensor] = place
        memory = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, tensor.requires_grad)
        place.put(memory)
    return copies


def _give_values(
    on_meta: Modules, init_fn: Callable[[nn.Module], None] | None, inside: dict[str, Unit]
) -> None:
    before = [_fingerprint(unit) for unit in inside.values()]
    for name, module in on_meta.items():
        with torch.no_grad():
            if init_fn is not None:
                init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
        for (other, unit), was in zip(inside.items(), before, strict=True):
            if _fingerprint(unit) != was:
                what = "reset_parameters()" if init_fn is None else "param_init_fn"
                raise ValueError(
                    f"{what} of module {name or '<root>'!r} has also changed {other!r} inside of "
                    f"it, which is a unit of its own and has its values already. It should set "
                    f"what the module itself has, as module.to_empty(device=..., recurse=False) "
                    f"does, and leave the rest alone."
                )


def move(modules: Modules, device: torch.device) -> None:
    """Move the parameters and buffers of one unit, shared ones once."""
    moved: dict[Tensor, Tensor] = {}
    for place in _places(modules):
        tensor = place.get()
        if tensor.device == device:
            continue
        if tensor not in moved:
            copy = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                copy = nn.Parameter(copy, tensor.requires_grad)
            moved[tensor] = copy
        place.put(moved[tensor])


def synchronize(modules: Modules, groups: list[Group]) -> None:
    """Give all ranks the values that rank 0 has.

    Args:
        groups: broadcast in the first, from its first rank; then, so that all get it, in the next.
            With hybrid sharding down the columns first: the first rank of every row is in the
            column of rank 0, whatever order the ranks are in.

    Raises:
        ValueError: ranks have other names, shapes or dtypes; or something is on a device that the
            groups do not send from. All ranks raise it.
    """
    # What is shared is sent twice: on one rank it may be shared, and on another not.
    states = {place.label: place.get().detach() for place in _places(modules)}
    _check_alike(states, groups)
    for tensor in states.values():
        for group in groups:
            broadcast(tensor, group)


def _check_alike(states: dict[str, Tensor], groups: list[Group]) -> None:
    # Without this a broadcast of another size would end the process, or leave the others waiting.
    mine = {label: f"{list(tensor.shape)}, {tensor.dtype}" for label, tensor in states.items()}
    problem: str | None = None
    for label, tensor in states.items():
        sends = dist.get_backend_config(groups[0])  # "cuda:nccl", say
        if problem is None and f"{tensor.device.type}:" not in sends:
            problem = (
                f"{label!r} is on {tensor.device}, and the process group sends from {sends} only. "
                f"Move the model first, or pass device_id="
            )
    for group in groups:  # and in the second what was found in the first, so that all ranks raise
        ranks = dist.get_process_group_ranks(group)
        said = gather_objects((mine, problem), group)
        for rank, (theirs, found) in zip(ranks, said, strict=True):
            problem = problem or found
            for label in {**mine, **theirs}:
                if problem is None and mine.get(label) != theirs.get(label):
                    here, there = mine.get(label, "not there"), theirs.get(label, "not there")
                    problem = (
                        f"{label!r} is {here} on rank {dist.get_rank()}, {there} on rank {rank}. "
                        f"Build the same model on all ranks"
                    )
    if problem is not None:
        raise ValueError(f"sync_module_states cannot send rank 0's values to all ranks: {problem}.")


def _tie(copies: list[tuple[Place, Place]]) -> None:
    for copy, first in copies:
        copy.put(first.get())


def _units_inside(modules: Modules) -> dict[str, Unit]:
    """The units just inside of ``modules``, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: unit
        for prefix, module in modules.items()
        for name, child in module.named_children()
        if (unit := unit_of(child)) is not None
    }


def _fingerprint(unit: Unit) -> tuple[int, int]:
    return unit.shard.data_ptr(), unit.shard._version

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.comm.collectives import Group, broadcast
from minifsdp.comm.consensus import consensus
from minifsdp.wrapping.module_tree import Modules, own_modules, unit_of


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


Shared = dict[Tensor, list[Place]]
"""What is on the meta device, and where: one tensor may be in several places."""


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
    """Give memory and values to what is on the meta device. What is shared there stays shared.

    Args:
        modules: of one unit, by name.
        device: where it should be.
        init_fn: called with each module, outer ones first, while everything is still on the meta
            device, as torch does: it may ask ``p.is_meta``, and make all that is below a module or
            only what the module itself has. None: each module that has something on the meta device
            gets memory, and its ``reset_parameters()`` gives the values.

    Raises:
        ValueError: there is no ``init_fn``, and a module has no ``reset_parameters``: nothing has
            been changed then. Or ``init_fn`` has left something on the meta device.
    """
    shared: Shared = {}
    for place in _places(modules):
        if place.get().is_meta:
            shared.setdefault(place.get(), []).append(place)
    if device.type == "meta" or not shared:
        return  # "meta": a virtual GPU, where nothing has values
    with _hidden_units(modules), torch.no_grad():
        if init_fn is None:
            _reset(modules, shared, device)
        else:
            for _, module in sorted(modules.items(), key=lambda item: item[0].count(".")):
                init_fn(module)
    _settle(modules, shared)


def _reset(modules: Modules, shared: Shared, device: torch.device) -> None:
    on_meta = {
        name: module
        for name, module in modules.items()
        if any(place.get().is_meta for place in _places({name: module}))
    }
    for name, module in on_meta.items():
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {name or '<root>'!r} ({type(module).__name__}) is on the meta device and "
                f"has no reset_parameters() to give it values. Add that method, or pass "
                f"param_init_fn=, which is called with each module."
            )
    # All of them first: reset_parameters() of one module may read what another one has.
    for tensor, places in shared.items():
        memory = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            memory = nn.Parameter(memory, tensor.requires_grad)
        for place in places:
            place.put(memory)
    for module in on_meta.values():
        module.reset_parameters()  # type: ignore[operator]


def _settle(modules: Modules, shared: Shared) -> None:
    # What was one tensor may have been made in each of its places, or in one. The first counts:
    # without this a model with tied weights would train two of them.
    for places in shared.values():
        made = [t for p in places if (t := p.tensors.get(p.name)) is not None and not t.is_meta]
        for place in places if made else ():
            place.put(made[0])
    for place in _places(own_modules(modules[""])):  # an init_fn may have put new modules there
        if place.get().is_meta:
            raise ValueError(
                f"param_init_fn has left {place.label!r} on the meta device, where it has no "
                f"memory. It is called with each module of the unit and has to give memory and "
                f"values to what the module has: module.to_empty(device=..., recurse=False), then "
                f"module.reset_parameters(), say."
            )


class _Made(nn.Module):
    """Stands where a unit inside is. That has its values, and is a chunk by now: a function that
    gives values to all below a module would write over them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.label = name

    def reset_parameters(self) -> None:
        """Nothing to do."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of {self.label!r} cannot be seen while the modules around it get their "
            f"values: it is a unit of its own and has its values already."
        )


@contextmanager
def _hidden_units(modules: Modules) -> Iterator[None]:
    inside = [
        (module, name, child, _Made(f"{prefix}.{name}" if prefix else name))
        for prefix, module in modules.items()
        for name, child in module._modules.items()
        if child is not None and unit_of(child) is not None
    ]
    for module, name, _, made in inside:
        module._modules[name] = made
    try:
        yield
    finally:
        for module, name, child, _ in inside:
            module._modules[name] = child


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
    problem: str | None = None
    sends = dist.get_backend_config(groups[0])  # "cuda:nccl", say
    for label, tensor in states.items():
        if problem is None and f"{tensor.device.type}:" not in sends:
            problem = (
                f"{label!r} is on {tensor.device}, and the process group sends from {sends} only. "
                f"Move the model first, or pass device_id="
            )
    found = {label: f"{list(tensor.shape)}, {tensor.dtype}" for label, tensor in states.items()}
    own = dist.get_rank(), found
    problem = consensus(groups, "the comparison of initial values", own, problem, _first_difference)
    if problem is not None:
        raise ValueError(f"sync_module_states cannot send rank 0's values to all ranks: {problem}.")


def _first_difference(
    found: list[tuple[int, dict[str, str]]], problems: list[str | None]
) -> str | None:
    first, mine = found[0]
    problem = next(filter(None, problems), None)
    for rank, theirs in found:
        for label in {**mine, **theirs}:
            if problem is None and mine.get(label) != theirs.get(label):
                here, there = mine.get(label, "not there"), theirs.get(label, "not there")
                problem = (
                    f"{label!r} is {here} on rank {first}, {there} on rank {rank}. "
                    f"Build the same model on all ranks"
                )
    return problem

"""Memory and values for the parameters of a unit, just before they are sharded.

A model that is too large for one machine must never exist as a whole. So it is built on the *meta*
device, where tensors have shapes and no memory. Each unit gets memory and values, and is sharded
before the next one gets any::

    meta      unit a: shapes               unit b: shapes
              a: memory, values -> shard
                                           b: memory, values -> shard

The most that a rank holds at a time is one whole unit, a second copy of it while it is flattened,
and the shards.

Values come from the modules themselves (``reset_parameters()``), or from the user's function, or
from rank 0, which sends them to the others (``sync_module_states``). In the first two cases each
rank draws its own random values, so all ranks need the same seed.

``fully_shard`` does none of this, nor does torch's: DTensors stay on meta (checks/first_step.py).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.comm.collectives import broadcast
from minifsdp.comm.consensus import consensus
from minifsdp.comm.groups import carries
from minifsdp.core.collectives import Group
from minifsdp.support.tensor_attribute import TensorAttribute
from minifsdp.wrapping.module_tree import (
    Modules,
    is_ignored,
    join_names,
    own_modules,
    own_params,
    unit_of,
)

Shared = dict[Tensor, list[TensorAttribute]]
"""Tensors, and where modules have them: a shared one is in several places."""


def materialize(
    modules: Modules, device: torch.device, init_fn: Callable[[nn.Module], None] | None
) -> None:
    """Give memory and values to what is on the meta device. What is shared there stays shared.

    Args:
        modules: of one unit, by name.
        device: where the memory should be.
        init_fn: called with each module, outer ones first, while everything is still on the meta
            device, as torch does: it may ask ``p.is_meta``, and fill everything below a module or
            only what the module itself has. None: everything gets memory, and each module that had
            something on the meta device gives it values with its ``reset_parameters()``.

    Raises:
        ValueError: there is no ``init_fn``, and a module has no ``reset_parameters``: nothing has
            been changed then. Or ``init_fn`` has left something on the meta device.
    """
    shared: Shared = {}
    for attribute in _on_meta(modules).values():
        shared.setdefault(attribute.get(), []).append(attribute)
    if device.type == "meta" or not shared:
        return  # the device is "meta" on a virtual GPU (sim/), where nothing has values
    with _hidden_units(modules), torch.no_grad():
        if init_fn is None:
            _reset(modules, device)
        else:
            for _, module in sorted(modules.items(), key=lambda item: item[0].count(".")):
                init_fn(module)
    _tie(shared)
    for name in _on_meta(own_modules(modules[""])):  # an init_fn may have put new modules there
        raise ValueError(
            f"param_init_fn has left {name!r} on the meta device, where it has no memory. It is "
            f"called with each module of the unit and has to give memory and values to what the "
            f"module has: module.to_empty(device=..., recurse=False), then "
            f"module.reset_parameters(), say."
        )


def _on_meta(modules: Modules) -> dict[str, TensorAttribute]:
    tensors = own_params(modules, buffers=True)
    return {name: attribute for name, attribute in tensors.items() if attribute.get().is_meta}


def _reset(modules: Modules, device: torch.device) -> None:
    on_meta = _on_meta(modules).values()
    owners = {attribute.module for attribute in on_meta}
    to_reset = {name: module for name, module in modules.items() if module in owners}
    for name, module in to_reset.items():
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {name or '<root>'!r} ({type(module).__name__}) is on the meta device and "
                f"has no reset_parameters() to give it values. Add that method, or pass "
                f"param_init_fn=, which is called with each module."
            )
    # Memory for all of them first: reset_parameters() of one module may read another one's.
    _replace(on_meta, lambda tensor: torch.empty_like(tensor, device=device))
    for module in to_reset.values():
        module.reset_parameters()  # type: ignore[operator]


def _replace(attributes: Iterable[TensorAttribute], new: Callable[[Tensor], Tensor]) -> None:
    """Put ``new(tensor)`` in the place of each tensor, once for a shared one, so that it stays
    shared. (torch's ``Module._apply``, of ``to()`` and ``to_empty()``, makes a new parameter for
    each place, and two tied weights would be trained apart.)"""
    replaced: dict[Tensor, Tensor] = {}
    for attribute in attributes:
        tensor = attribute.get()
        if tensor not in replaced:
            value = new(tensor.detach())
            is_param = isinstance(tensor, nn.Parameter)
            replaced[tensor] = nn.Parameter(value, tensor.requires_grad) if is_param else value
        attribute.set(replaced[tensor])


def _tie(shared: Shared) -> None:
    """Put one tensor again in all places that shared one: a function may have made a new tensor in
    each place, or in one of them only. The first of these is used."""
    for attributes in shared.values():
        made = [t for a in attributes if (t := a.get()) is not None and not t.is_meta]
        for attribute in attributes if made else ():
            attribute.set(made[0])


class _HiddenUnit(nn.Module):
    """Stands where a unit inside, or an ignored module, is while the modules around it get their
    values. A function that fills everything below a module would overwrite it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.label = name

    def reset_parameters(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of {self.label!r} cannot be seen while the modules around it get their "
            f"values: it is a unit of its own and has its values already, or it is ignored."
        )


@contextmanager
def _hidden_units(modules: Modules) -> Iterator[None]:
    inside = [
        (module, name, child, _HiddenUnit(join_names(prefix, name)))
        for prefix, module in modules.items()
        for name, child in module._modules.items()
        if child is not None and (unit_of(child) is not None or is_ignored(child))
    ]
    for module, name, _, hidden in inside:
        module._modules[name] = hidden
    try:
        yield
    finally:
        for module, name, child, _ in inside:
            module._modules[name] = child


def move(modules: Modules, device: torch.device) -> None:
    """Move the parameters and buffers of one unit. What is shared stays shared. What is still on
    the meta device stays there: it has no values that could be moved."""
    tensors = own_params(modules, buffers=True).values()
    elsewhere = [a for a in tensors if a.get().device != device and not a.get().is_meta]
    _replace(elsewhere, lambda tensor: tensor.to(device))


def synchronize(modules: Modules, groups: list[Group]) -> None:
    """Give all ranks the values that rank 0 has.

    Args:
        groups: to broadcast in, each from its first rank, one after another. With hybrid sharding
            first the replicate group, then the shard group: the first ranks of all shard groups are
            in the replicate group of rank 0, in whatever order the ranks are.

    Raises:
        ValueError: names, shapes or dtypes differ between ranks; or something is on a device that
            the groups do not send from. All ranks raise it.
    """
    # A shared tensor is sent twice, because it may be shared on one rank and not on another.
    tensors = own_params(modules, buffers=True)
    states = {name: attribute.get().detach() for name, attribute in tensors.items()}
    _check_alike(states, groups)
    for tensor in states.values():
        for group in groups:
            broadcast(tensor, group)


def _check_alike(states: dict[str, Tensor], groups: list[Group]) -> None:
    # Without this a broadcast of another size would end the process, or leave the others waiting.
    problem: str | None = None
    for label, tensor in states.items():
        if problem is None and not carries(groups[0], tensor.device):
            problem = (
                f"{label!r} is on {tensor.device}, and the process group sends from "
                f"{dist.get_backend_config(groups[0])} only. Move the model first, or pass "
                f"device_id="
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

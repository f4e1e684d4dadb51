"""State dicts of optimizers, by the names of torch's FSDP1::

    state = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))

    {"state": {"0.weight": {"step": 3, "exp_avg": [3, 2], ...}, "0.bias": ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["0.weight", "0.bias", ...]}]}

The state is under the names of parameters, as that of ``get_optimizer_state_dict()`` in
torch.distributed.checkpoint, so it does not depend on how the model is sharded. The settings of
state_dict_type.py say whether it has whole tensors or DTensors.

Source: ``torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict`` (pytorch 2.13).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import ShardedOptimStateDictConfig
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from minifsdp.between_steps.as_dtensors import as_dtensors
from minifsdp.between_steps.state_dict_type import get_state_dict_type
from minifsdp.between_steps.unit_dtensors import detached
from minifsdp.checks.unsupported import refuse
from minifsdp.comm.consensus import gather_objects
from minifsdp.support.dtensors import like
from minifsdp.wrapping.module_tree import clean

_OTHER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")  # which state_dict() has not either


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """The state of an optimizer, under the names of parameters. Every rank has to call it.

    Args:
        model: whose parameters the optimizer has.
        optim_state_dict: ``optim.state_dict()``, or None; no other can be converted.

    Returns:
        ``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{"params": [name, ...], ...}]}``
        with whole tensors or DTensors, as set by :func:`set_state_dict_type`. Empty on all ranks
        but the first with ``rank0_only``.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's; or the given state is not
            the optimizer's.
        RuntimeError, NotImplementedError: as :func:`as_dtensors`; ``group`` is not there.
    """
    refuse(group=group)
    _check_is_its_own(optim, optim_state_dict)
    config: Any = get_state_dict_type(model).optim_state_dict_config
    sharded = isinstance(config, ShardedOptimStateDictConfig)
    shown = not getattr(config, "rank0_only", False) or dist.get_rank() == 0

    def convert(value: Any) -> Any:
        if isinstance(value, DTensor) and not sharded:
            local = value._local_tensor.to(value.device_mesh.device_type)  # with offload on a CPU
            value = like(value, local).full_tensor()
        if not shown:
            return None  # this rank had to take part in the gather
        return detached(value, config.offload_to_cpu) if isinstance(value, Tensor) else value

    with as_dtensors(model, optim, writeback=False):
        if sharded and not optim.state:
            _make_states(model, optim)
        names = _names(model, optim)
        own = optim.state_dict()
        state = {names[number]: tree_map(convert, entry) for number, entry in own["state"].items()}
        groups = [{**g, "params": [names[n] for n in g["params"]]} for g in own["param_groups"]]
    return {"state": state, "param_groups": groups} if shown else {}


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Load what :func:`optim_state_dict` has returned, for a model that is sharded in any way.

    The optimizer has the state already when this returns, with ``load_directly`` or without; to
    load what is returned once more does no harm, and is what programs do. Every rank calls it.

    Args:
        optim_state_dict: whole tensors or DTensors. If the settings say ``rank0_only``, that of the
            first rank is used, and the others may give None.

    Returns:
        What ``optim.load_state_dict()`` takes on this rank.

    Raises:
        ValueError: parameters that are in one group have different settings in the given groups.
        RuntimeError: the state of a parameter is missing, or the parameters of a unit in chunks
            have states that cannot be one.
    """
    refuse(group=group, is_named_optimizer=is_named_optimizer)
    config = get_state_dict_type(model).optim_state_dict_config
    given = optim_state_dict or {"state": {}, "param_groups": []}
    given = {
        "state": {name: dict(entry) for name, entry in given["state"].items()},
        "param_groups": [dict(group) for group in given["param_groups"]],
    }
    tensors = [value for value in tree_leaves(given["state"]) if isinstance(value, Tensor)]
    whole = bool(tensors) and not any(isinstance(tensor, DTensor) for tensor in tensors)
    if rank0_only := getattr(config, "rank0_only", False):  # so that all ranks check the same
        world = dist.group.WORLD
        assert world is not None
        given["param_groups"], whole = gather_objects((given["param_groups"], whole), world)[0]
    broadcast = whole and rank0_only
    with as_dtensors(model, optim):
        _check_groups(_names(model, optim), optim, given["param_groups"])
        options = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=broadcast)
        with _without_empty_groups(optim, given):
            set_optimizer_state_dict(model, optim, given, options=options)
    return optim.state_dict()


@contextmanager
def _without_empty_groups(optim: Optimizer, given: dict[str, Any]) -> Iterator[None]:
    """Hide groups without parameters. torch gives such a group the settings of the last one, and
    leaves the last one without any (2.13)."""
    empty = [(at, group) for at, group in enumerate(optim.param_groups) if not group["params"]]
    settings = [group for group in given["param_groups"] if not group["params"]]
    given["param_groups"] = [group for group in given["param_groups"] if group["params"]]
    optim.param_groups[:] = [group for group in optim.param_groups if group["params"]]
    try:
        yield
    finally:
        for at, group in empty:
            optim.param_groups.insert(at, group)
    if len(settings) == len(empty):
        for (_, group), loaded in zip(empty, settings, strict=True):
            group.update(loaded, params=group["params"])


def _make_states(model: nn.Module, optim: Optimizer) -> None:
    """Give an optimizer that has not stepped its states. Programs load into what a sharded state
    dict has; torch's FSDP1 gives them an empty one, and what was saved is not loaded (2.13)."""
    get_optimizer_state_dict(model, optim)  # makes them, by a step without gradients or rate
    for entry in optim.state.values():
        if "step" in entry:  # and the step that is to come is the first one
            entry["step"] = torch.zeros_like(torch.as_tensor(entry["step"]))


def _names(model: nn.Module, optim: Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order in which it numbers them."""
    names = {param: clean(name) for name, param in model.named_parameters()}
    for prefix in _OTHER_PREFIXES:
        names = {param: name.replace(prefix, "") for param, name in names.items()}
    params = [param for group in optim.param_groups for param in group["params"]]
    for param in params:
        if param not in names:
            raise ValueError(
                f"{type(optim).__name__} has a parameter of shape {list(param.shape)} that is not "
                f"one of the model's. Give the model that the optimizer was built for."
            )
    return [names[param] for param in params]


def _check_is_its_own(optim: Optimizer, given: dict[str, Any] | None) -> None:
    own = {id(value) for value in tree_leaves(list(optim.state.values()))}
    if given is not None and any(id(v) not in own for v in tree_leaves(given["state"])):
        raise ValueError(
            "optim_state_dict() was given a state that is not the optimizer's own. Load it into "
            "the optimizer first, or leave the argument out."
        )


def _check_groups(names: list[str], optim: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Check that each of the optimizer's groups can get its settings from the given ones. torch
    would take those of the last group that has a parameter of it."""
    given = {name: group for group in groups for name in group["params"]}
    for group in optim.param_groups:
        its, names = names[: len(group["params"])], names[len(group["params"]) :]
        settings = {
            name: {key: value for key, value in given[name].items() if key != "params"}
            for name in its
            if name in given
        }
        for name, found in settings.items():
            first = next(iter(settings))
            if found != settings[first]:
                raise ValueError(
                    f"{first!r} and {name!r} are in one parameter group of this optimizer, and in "
                    f"two with different settings in the state to be loaded: {settings[first]} and "
                    f"{found}. Build the optimizer with the same groups; with chunks that takes "
                    f"use_orig_params=True, or a unit for each group."
                )

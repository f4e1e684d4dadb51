"""The functions that torch's FSDP1 had before ``optim_state_dict``, for programs that call them.

Each is one call of what optim_state_dict.py has now::

    full_optim_state_dict(model, optim)              whole tensors, on the first rank
    sharded_optim_state_dict(model, optim)           DTensors
    shard_full_optim_state_dict(state, model)        to be loaded, from whole tensors on each rank
    scatter_full_optim_state_dict(state, model)      ... on the first rank
    flatten_sharded_optim_state_dict(state, model)   ... from DTensors
    rekey_optim_state_dict(state, kind, model)       names of parameters to numbers, and back

The last one does not take models in chunks. torch's ``optim_input`` is what the optimizer was built
from. To give the optimizer itself, ``optim=``, is better. If both are left out, the optimizer is
taken to have been built from ``model.parameters()``.

Source: ``torch.distributed.fsdp.FullyShardedDataParallel`` (pytorch 2.13).
"""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
)
from torch.optim.optimizer import Optimizer

from minifsdp.between_steps.local_optim_state import (
    Groups,
    group_settings,
    local_state,
    named_params,
)
from minifsdp.between_steps.optim_state_dict import named_state
from minifsdp.chunks.flat_parameter import FlatParameter

StateDict = dict[str, Any]
Input = Iterable[nn.Parameter] | Groups | None


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: Input = None,
    rank0_only: bool = True,
    group: Any = None,
) -> StateDict:
    """:func:`optim_state_dict` with whole tensors in the host's memory. With ``rank0_only`` it is
    empty on all ranks but the first."""
    _warn_of_input(optim_input)
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return named_state(model, optim, None, config, group)


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> StateDict:
    """:func:`optim_state_dict` with DTensors, of which each rank has its part."""
    return named_state(model, optim, None, ShardedOptimStateDictConfig(), group)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict,
    model: nn.Module,
    optim_input: Input = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """:func:`optim_state_dict_to_load`, from whole tensors that each rank has."""
    return local_state(model, _groups(model, optim_input, optim), full_optim_state_dict, False)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Input = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> StateDict:
    """:func:`optim_state_dict_to_load`, from whole tensors that the first rank has. The others give
    None."""
    groups = _groups(model, optim_input, optim)
    return local_state(model, groups, full_optim_state_dict, True, group)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: Optimizer
) -> StateDict:
    """:func:`optim_state_dict_to_load`, from DTensors."""
    return local_state(model, optim.param_groups, sharded_optim_state_dict, False)


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Input = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """The same state with numbers for keys, or with the names of parameters. The tensors stay as
    they are, so this is for models whose optimizer has whole parameters, or rows.

    Args:
        optim_state_key_type: what the keys are to be: PARAM_ID or PARAM_NAME.

    Raises:
        ValueError: the model is sharded in chunks, whose states belong to no single parameter; the
            keys are not those of this optimizer; or as :func:`group_settings`.
    """
    groups = _groups(model, optim_input, optim)
    params = named_params(model, groups)
    if any(isinstance(param, FlatParameter) for param in params.values()):
        raise ValueError(
            "rekey_optim_state_dict() changes keys only, and the optimizer of a model in chunks "
            "has other tensors, too. Use optim_state_dict() and optim_state_dict_to_load()."
        )
    state, names = optim_state_dict["state"], list(params)
    by_name = any(isinstance(key, str) for key in state)
    if not by_name:
        state = {names[key]: entry for key, entry in state.items() if key < len(names)}
        given = [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in optim_state_dict["param_groups"]
        ]
    else:
        given = optim_state_dict["param_groups"]
    if len(state) != len(optim_state_dict["state"]) or not state.keys() <= params.keys():
        known = {*names} if by_name else {*range(len(names))}
        strange = next(iter(optim_state_dict["state"].keys() - known))
        raise ValueError(f"the state has an entry {strange!r}, which the model does not know")
    settings = group_settings(names, groups, {"state": state, "param_groups": given})
    key_of: dict[str, Any] = {name: name for name in names}
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        key_of = {name: number for number, name in enumerate(names)}
    name_of = {param: name for name, param in params.items()}
    return {
        "state": {key_of[name]: entry for name, entry in state.items()},
        "param_groups": [
            {**its, "params": [key_of[name_of[param]] for param in group["params"]]}
            for group, its in zip(groups, settings, strict=True)
        ],
    }


def _groups(model: nn.Module, optim_input: Input, optim: Optimizer | None) -> Groups:
    """The parameter groups of the optimizer that a state is for."""
    _warn_of_input(optim_input)
    if optim_input is not None and optim is not None:
        raise ValueError("optim_input and optim were given together: leave out optim_input")
    if optim is not None:
        return optim.param_groups
    given: list[Any] = list(model.parameters() if optim_input is None else optim_input)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    return [
        {**group, "params": [one] if isinstance(one := group["params"], nn.Parameter) else [*one]}
        for group in given
    ]


def _warn_of_input(optim_input: Input) -> None:
    if optim_input is not None:
        warnings.warn(
            "the `optim_input` argument is deprecated, in torch, too. Give the optimizer instead.",
            FutureWarning,
            stacklevel=3,
        )

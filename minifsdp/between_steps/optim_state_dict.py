"""State dicts of optimizers, by the names of torch's FSDP1::

    state = FSDP.optim_state_dict(model, optimizer)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))

    {"state": {"0.weight": {"step": 3, "exp_avg": [3, 2], ...}, "0.bias": ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["0.weight", "0.bias", ...]}]}

The state is under the names of parameters, as in ``get_optimizer_state_dict()`` of
torch.distributed.checkpoint, so it does not depend on how the model is sharded. The settings of
state_dict_type.py say whether it has whole tensors or DTensors.

Source: ``torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict`` (pytorch 2.13).
"""

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map

from minifsdp.between_steps.full_params import is_first
from minifsdp.between_steps.local_optim_state import local_state, named_params, unit_sharing
from minifsdp.between_steps.state_dict_type import get_state_dict_type
from minifsdp.chunks.as_dtensors import as_dtensors
from minifsdp.chunks.optim_state import agree, check_state
from minifsdp.chunks.optimizer_dtensors import OptimizerState, make_states
from minifsdp.chunks.unit_dtensors import detached
from minifsdp.support.dtensors import like
from minifsdp.wrapping.module_tree import clean


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """The state of an optimizer, under the names of parameters. Every rank has to call it.

    Args:
        model: whose parameters the optimizer has.
        optim_state_dict: what ``optim.state_dict()`` has returned on this rank, now or before;
            None: now. Its keys may be numbers or, as some optimizers have them, the names that
            ``model.named_parameters()`` gives. Without "param_groups" the result has none either.
        group: not needed. If it is given, it has to have all ranks that share the model.

    Returns:
        ``{"state": {name: {"exp_avg": ..., ...}}, "param_groups": [{"params": [name, ...], ...}]}``
        with whole tensors or DTensors, as set by :func:`set_state_dict_type`. With ``rank0_only``
        it is empty on all ranks but the first.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's; the given state has other
            parameters than the optimizer; a rank that shares the model is not in ``group``.
        RuntimeError: as :func:`as_dtensors`; the given state is that of other chunks.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    return named_state(model, optim, optim_state_dict, config, group)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: dict[str, Any] | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """What ``optim.load_state_dict()`` takes on this rank, from what :func:`optim_state_dict` has
    returned for a model that was sharded in any way. Every rank calls it.

    Args:
        optim_state_dict: whole tensors or DTensors. If the settings say ``rank0_only``, that of the
            first rank is used, and the others may give None.
        is_named_optimizer: the optimizer wants names for keys, those of
            ``model.named_parameters()``, in place of numbers.
        load_directly: load it into ``optim``, too.
        group: as for :func:`optim_state_dict`.

    Raises:
        ValueError: parameters that are in one group have different settings in the given groups; or
            the given state does not know a parameter that the optimizer has.
        RuntimeError: the parameters of a unit in chunks have states that cannot be one.
    """
    config = get_state_dict_type(model).optim_state_dict_config
    from_first = bool(getattr(config, "rank0_only", False))
    named = is_named_optimizer
    found = local_state(model, optim.param_groups, optim_state_dict, from_first, group, named)
    if load_directly:
        optim.load_state_dict(found)
    return found


# ---------------------------------------------------- from an optimizer to the names of parameters


def named_state(
    model: nn.Module,
    optim: Optimizer,
    given: dict[str, Any] | None,
    config: OptimStateDictConfig,
    group: Any = None,
) -> dict[str, Any]:
    """:func:`optim_state_dict`, with given settings."""
    unit = unit_sharing(model, group)
    sharded = isinstance(config, ShardedOptimStateDictConfig)
    first = dist.get_rank() == 0 if unit is None else is_first(unit)
    shown = first or not getattr(config, "rank0_only", False)

    def convert(value: Any) -> Any:
        if isinstance(value, DTensor) and not sharded:
            local = value._local_tensor.to(value.device_mesh.device_type)  # with offload on a CPU
            value = like(value, local).full_tensor()
        if not shown:
            return None  # this rank had to take part in the gather
        return detached(value, config.offload_to_cpu) if isinstance(value, Tensor) else value

    source = optim if given is None else _as_given(model, optim, given)
    with ExitStack() as undo:
        if sharded and given is None and not optim.state:
            undo.callback(optim.state.clear)  # to look at it is no step
            make_states(optim)
        undo.enter_context(as_dtensors(model, source, writeback=False))
        params = named_params(model, source.param_groups)
        # All ranks gather in the same order, also if their optimizers have different orders.
        state = {
            name: tree_map(convert, dict(source.state[params[name]]))
            for name in sorted(params)
            if params[name] in source.state
        }
        found: dict[str, Any] = {"state": {name: state[name] for name in params if name in state}}
        if given is None or "param_groups" in given:
            name_of = {param: name for name, param in params.items()}
            found["param_groups"] = [
                {**group, "params": [name_of[param] for param in group["params"]]}
                for group in source.param_groups
            ]
    return found if shown else {}


def _as_given(model: nn.Module, optim: Optimizer, given: dict[str, Any]) -> OptimizerState:
    """The optimizer's parameters, with the settings and states that were given for them.

    Raises:
        ValueError: the state is not of this optimizer's parameters.
        RuntimeError: the state is of other chunks. All ranks raise it.
    """
    params = [param for group in optim.param_groups for param in group["params"]]
    keys: dict[Any, Tensor] = dict(enumerate(params))
    state = given["state"]
    if any(isinstance(key, str) for key in state):
        keys = {**named_params(model, optim.param_groups)}
        state = {clean(key): entry for key, entry in state.items()}
    counts = [len(group["params"]) for group in given.get("param_groups", optim.param_groups)]
    if not state.keys() <= keys.keys() or counts != [len(g["params"]) for g in optim.param_groups]:
        raise ValueError(
            f"optim_state_dict() was given a state that {type(optim).__name__} cannot have returned"
            f" from state_dict(): it has {len(state)} states and groups of {counts} parameters, "
            f"and the optimizer has {len(params)} parameters. To load what optim_state_dict() "
            f"returns, there is optim_state_dict_to_load()."
        )
    groups = [
        {**settings, "params": group["params"]}
        for settings, group in zip(
            given.get("param_groups", optim.param_groups), optim.param_groups, strict=True
        )
    ]
    found = OptimizerState(groups, {keys[key]: dict(entry) for key, entry in state.items()})
    wrong = next(filter(None, (check_state(found, group) for group in groups)), None)
    agree(wrong, groups)
    return found

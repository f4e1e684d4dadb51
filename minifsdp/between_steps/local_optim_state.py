"""From an optimizer's state under the names of parameters to the state of this rank's optimizer.

::

    {"weight": {"step": 3, "exp_avg": [3, 2]}, "bias": {...}}      whole tensors or DTensors

    {0: {"step": 3, "exp_avg": [5]}}            chunks: one state for each unit
    {0: {"step": 3, "exp_avg": [2, 2]}, 1: ..}  rows: DTensors, as their parameters

Nothing is loaded here, and no optimizer is needed, only its groups of parameters. The settings in
the state replace those of the groups; a group keeps a setting that the state does not have. The
tensors are new, so that a step does not change the state that was given.

If only the first rank has the state, it sends one tensor after the other, and each rank keeps its
part, so that no other rank ever has all of it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_any, tree_map

from minifsdp.between_steps.full_params import is_first
from minifsdp.chunks.as_dtensors import as_dtensors
from minifsdp.chunks.optim_state import MARK
from minifsdp.chunks.optimizer_dtensors import NAMES, OptimizerState
from minifsdp.chunks.unit_dtensors import divide_alike
from minifsdp.comm.collectives import broadcast
from minifsdp.comm.consensus import consensus
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.dtensors import like
from minifsdp.wrapping.module_tree import clean, unit_of

Groups = list[dict[str, Any]]
"""Parameter groups, as an optimizer has them."""

_OTHER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")  # torch's checkpoints omit both


def local_state(
    model: nn.Module,
    groups: Groups,
    given: dict[str, Any] | None,
    from_first: bool,
    group: Any = None,
    named: bool = False,
) -> dict[str, Any]:
    """What an optimizer with these groups loads on this rank. Every rank calls it.

    Args:
        given: the state under the names of parameters.
        from_first: the first rank has it for all; the others may give None.
        group: as for :func:`unit_sharing`.
        named: the keys are the names of ``model.named_parameters()``, and not numbers.

    Raises:
        ValueError: this rank has no state; or as :func:`group_settings`.
        RuntimeError: as :func:`minifsdp.as_dtensors`.
    """
    unit = unit_sharing(model, group)
    sender = unit if from_first else None
    if sender is not None:
        sent = _sent_by_first(given, sender)
        given, sender = (given, None) if sent is None else (sent, sender)
    if given is None:
        raise ValueError(
            "the state to be loaded is None on this rank. If only the first rank has it, say so by "
            "FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, "
            "optim_state_dict_config=FullOptimStateDictConfig(rank0_only=True))."
        )
    own = OptimizerState(groups, {})
    with as_dtensors(model, own):
        params = named_params(model, own.param_groups)
        settings = group_settings(params, own.param_groups, given)
        divided = _divided(given["state"], params)
        for name, entry in given["state"].items():
            found = dict(entry)
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    whole = value if sender is None else _received(value, sender)
                    found[key] = _part(whole, params.get(name), key in divided)
            if name in params:
                own.state[params[name]] = found
    # From here on the groups have their own parameters again.
    order = [param for group in own.param_groups for param in group["params"]]
    key_of: dict[Tensor, Any] = {param: number for number, param in enumerate(order)}
    if named:
        key_of = {param: str(name) for name, param in model.named_parameters()}
    loaded: dict[str, Any] = {"state": {key_of[param]: its for param, its in own.state.items()}}
    if "param_groups" in given:
        loaded["param_groups"] = [
            {**group, **its, "params": [key_of[param] for param in group["params"]]}
            for group, its in zip(own.param_groups, settings, strict=True)
        ]
    return loaded


def named_params(model: nn.Module, groups: Groups) -> dict[str, Any]:
    """The parameters of an optimizer by their names, in the order in which it numbers them.

    Raises:
        ValueError: one is not the model's.
    """
    names = {param: clean(name) for name, param in model.named_parameters()}
    for prefix in _OTHER_PREFIXES:
        names = {param: name.replace(prefix, "") for param, name in names.items()}
    params = [param for group in groups for param in group["params"]]
    for param in params:
        if param not in names:
            raise ValueError(
                f"the optimizer has a parameter of shape {list(param.shape)} that is not one of "
                f"the model's. Give the model that the optimizer was built for."
            )
    return {names[param]: param for param in params}


def unit_sharing(model: nn.Module, group: Any) -> FeaturedUnit | None:
    """The outermost unit of a model, whose ranks share it; None if nothing in it is sharded.

    Args:
        group: torch's functions take the ranks that share the model. None: they are not checked.

    Raises:
        ValueError: a rank that is not in ``group`` shares the unit.
    """
    unit = next((u for module in model.modules() if (u := unit_of(module)) is not None), None)
    if unit is not None and group is not None:
        shared_by = {
            rank
            for own in (unit.shard_group, unit.replicate_group)
            if own is not None
            for rank in dist.get_process_group_ranks(own)
        }
        if not shared_by <= {*dist.get_process_group_ranks(group)}:
            raise ValueError(
                f"the model is shared by ranks {sorted(shared_by)}, and group has only "
                f"{dist.get_process_group_ranks(group)}. All ranks that share it take part: give "
                f"its own group, or leave the argument out."
            )
    return unit


def group_settings(names: Any, groups: Groups, given: dict[str, Any]) -> Groups:
    """The settings in ``given`` of each of these groups.

    Args:
        names: of the parameters in ``groups``, one after the other.
        groups: of an optimizer.

    Raises:
        ValueError: ``given`` does not know a parameter, or has parameters of one group in two that
            have different settings. torch would take those of the last group.
    """
    known = {name: group for group in given.get("param_groups", ()) for name in group["params"]}
    if "param_groups" in given:
        for name in names:
            if name not in known and name not in given["state"]:
                raise ValueError(
                    f"the optimizer has parameter {name!r}, and the state to be loaded does not "
                    f"know it: that has {len(known)} parameters, {', '.join([*known][:3])} ... "
                    f"Make the optimizer with the parameters that it had when it was saved."
                )
    empty = [group for group in given.get("param_groups", ()) if not group["params"]]
    if len(empty) != sum(not group["params"] for group in groups):
        empty = [{} for group in groups if not group["params"]]
    rest, found = list(names), []
    for group in groups:
        its, rest = rest[: len(group["params"])], rest[len(group["params"]) :]
        settings = {name: _settings(known[name]) for name in its if name in known}
        first = next(iter(settings), None)
        for name, own in settings.items():
            if own != settings[first]:
                raise ValueError(
                    f"{first!r} and {name!r} are in one parameter group of this optimizer, and in "
                    f"two with different settings in the state to be loaded: {settings[first]} and "
                    f"{own}. Build the optimizer with the same groups; with chunks that takes "
                    f"use_orig_params=True, or a unit for each group."
                )
        if first is not None:
            found.append(settings[first])
        else:  # no parameter says which group it is, so groups without any are taken in turn
            found.append(_settings(empty.pop(0)) if not group["params"] else {})
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", NAMES, MARK)}


def _sent_by_first(given: dict[str, Any] | None, unit: FeaturedUnit) -> dict[str, Any] | None:
    """The state that the first rank has; on the others its tensors have no values. None if it has
    DTensors, of which each rank has its own part."""
    mine = given if is_first(unit) else None
    if mine is not None and tree_any(lambda value: isinstance(value, DTensor), mine["state"]):
        mine = None
    described = mine and {
        **mine,
        "state": tree_map(
            lambda v: v.detach().to("meta") if isinstance(v, Tensor) else v, mine["state"]
        ),
    }
    about = "the state of an optimizer that the first rank loads"
    groups = (unit.replicate_group, unit.shard_group)
    sent: Any = consensus(groups, about, None, described, lambda _, of_ranks: of_ranks[0])
    return mine if mine is not None else sent


def _received(value: Tensor, unit: FeaturedUnit) -> Tensor:
    """The value that the first rank has, on every rank."""
    sent = torch.empty_like(value, device=unit.device)
    if not value.is_meta:
        sent.copy_(value)
    for group in (unit.replicate_group, unit.shard_group):
        if group is not None:
            broadcast(sent, group)
    return sent


def _divided(state: dict[str, Any], params: dict[str, Any]) -> set[str]:
    """Which entries have a value for each element of a parameter; the others are numbers. Only for
    a parameter without dimensions both look alike, so parameters with dimensions decide."""
    shapes = {name: params[name].shape for name in state if name in params and params[name].dim()}
    if not shapes:
        return {key for entry in state.values() for key in entry} - {"step"}
    return {
        key
        for name, shape in shapes.items()
        for key, value in state[name].items()
        if isinstance(value, Tensor) and value.shape == shape
    }


def _part(value: Tensor, param: Tensor | None, divided: bool) -> Tensor:
    """This rank's part of an entry for a parameter, in memory of its own."""
    if isinstance(param, DTensor) and divided and value.shape == param.shape:
        return like(param, divide_alike(value, param)._local_tensor.clone())
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()

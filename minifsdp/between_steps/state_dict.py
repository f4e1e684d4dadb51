"""State dicts: save and load the model as if it were not sharded.

``model.state_dict()`` has unsharded parameters under their original names, on every rank, and
``model.load_state_dict()`` takes such a dict. So checkpoints can be exchanged with DDP, with a
plain model and with any number of ranks. Every rank has to call both, because all ranks gather the
parameters together.

torch visits the tree of modules, and calls hooks before and after each of them::

    FullyShardedDataParallel       its hooks remove its prefix from the names, and add it again
      └─ wrapped module            its hooks unshard the unit before the visit, and reshard it after
           └─ ...

So only units that are inside one another are unsharded at the same time, and
``model.module.state_dict()`` works as well. The values are copies, on the device that computes
unless ``offload_to_cpu`` is set: writing to them does not change the model. (A plain module returns
its own tensors, which the next step changes.)

With ``StateDictType.SHARDED_STATE_DICT`` (state_dict_type.py) the parameters are DTensors instead,
of which each rank has its rows (chunks/unit_dtensors.py), and no unit is gathered for them.
torch's ``get_model_state_dict()`` gets DTensors in any case. What is loaded may be of either kind.
"""

import weakref
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from minifsdp.between_steps.checkpoint_calls import ModelStateDict, WrapperRef, asked_by
from minifsdp.between_steps.full_params import Options, full_params, is_first
from minifsdp.between_steps.state_dict_calls import StateDictCalls
from minifsdp.chunks.unit_dtensors import EXCHANGED, Form, detached, divide_alike
from minifsdp.support.dtensors import local_of
from minifsdp.wrapping.module_tree import (
    WRAPPER_PREFIX,
    clean,
    join_names,
    own_modules,
)


def register_hooks(wrapper: Any) -> None:
    """Make a wrapper save and load unsharded parameters, wherever in a tree of modules it is."""
    wrapper.register_state_dict_post_hook(_remove_prefix)
    wrapper._register_state_dict_hook(_as_model_state_dict)  # the only kind that may replace it
    wrapper.register_load_state_dict_pre_hook(_add_prefix)
    module, ref = wrapper.module, weakref.ref(wrapper)  # the module may outlive its wrapper
    module.register_state_dict_pre_hook(partial(_before_save, ref))
    module.register_state_dict_post_hook(partial(_after_save, ref))
    module.register_load_state_dict_pre_hook(partial(_before_load, ref))
    module.register_load_state_dict_post_hook(partial(_after_load, ref))
    if wrapper._unit.mesh is not None:
        register_rows_hook(module)


def register_rows_hook(module: Any) -> None:
    """Let a module whose parameters are DTensors between steps load tensors that are whole, or
    divided in any way. Each module of the unit gets the hook, since it may be loaded alone."""
    part: Any
    for part in own_modules(module).values():
        part.register_load_state_dict_pre_hook(_divide)


def _divide(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Divide the values to be loaded as the DTensors of the unit are divided."""
    for key, own, attribute in _places(module, prefix):
        value, param = state.get(key), own._parameters.get(attribute)
        if isinstance(value, Tensor) and isinstance(param, DTensor) and value.shape == param.shape:
            state[key] = divide_alike(value, param)


def _places(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module, str]]:
    """The names of a unit's parameters in a state dict, and where modules have them."""
    return [
        (prefix + join_names(name, attribute), own, attribute)
        for name, own in own_modules(module).items()
        for attribute in own._parameters
    ]


# ----------------------------------------------- hooks of the wrapped module: unshard and reshard


def _before_save(ref: WrapperRef, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    wrapper = _wrapper_of(module, ref)
    if wrapper is not None:
        kind = wrapper._state_dict_settings.state_dict_type
        sharded = kind is StateDictType.SHARDED_STATE_DICT or asked_by("_get_model_state_dict")
        _unshard_unit(wrapper, writeback=False, form=EXCHANGED if sharded else None)


def _after_save(
    ref: WrapperRef, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    wrapper, config, form = _wrapper_of(module, ref), None, None
    if wrapper is not None:
        config = wrapper._state_dict_settings.state_dict_config
        form = wrapper._hooks.summoned.get(wrapper._unit)
    to_cpu = config is not None and config.offload_to_cpu
    copies: dict[tuple[object, ...], Tensor] = {}  # a parameter with two names stays one tensor
    storages = _own_storages(module) if form is None or form.copies else ()
    for key in _names_below(state, prefix):
        value = state[key]
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            state[key] = detached(value, to_cpu)  # a sparse buffer: it has no storage to know it by
        elif isinstance(value, Tensor) and local_of(value).untyped_storage().data_ptr() in storages:
            place = (local_of(value).data_ptr(), value.shape, value.dtype)
            if place not in copies:
                copies[place] = detached(value, to_cpu)
            state[key] = copies[place]
    if wrapper is not None:
        _reshard_unit(wrapper)
    if getattr(config, "rank0_only", False) and not is_first(wrapper._unit):
        for key in _names_below(state, prefix):
            del state[key]


def _before_load(
    ref: WrapperRef,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    places = _places(module, prefix)
    sharded = any(isinstance(state.get(key), DTensor) for key, _, _ in places)
    wrapper = _wrapper_of(module, ref)
    if wrapper is not None:
        form = EXCHANGED if sharded else None
        _unshard_unit(wrapper, True, form, missing, unexpected, errors)
    _divide(module, state, prefix)


def _after_load(ref: WrapperRef, module: nn.Module, incompatible: object) -> None:
    wrapper = _wrapper_of(module, ref)
    if wrapper is not None:
        _reshard_unit(wrapper)


def _wrapper_of(module: nn.Module, ref: WrapperRef) -> Any:
    """The wrapper of ``module``; None if it is gone, or if ``module`` is a copy of the wrapped
    module, which has the same hooks."""
    wrapper = ref()
    return None if wrapper is None or wrapper.module is not module else wrapper


def _unshard_unit(wrapper: Any, writeback: bool, form: Form | None, *messages: list[str]) -> None:
    unit, calls = wrapper._unit, wrapper._engine.layer(StateDictCalls)
    calls.close_aborted(unit)
    with ExitStack() as stack:
        stack.callback(_clean_names, messages)
        inside = wrapper._hooks.summoned.get(unit)  # of a block that shows them in this form
        options = Options(writeback, form=inside or form)
        stack.enter_context(full_params(wrapper._hooks, [unit], options))
        calls.held[unit] = stack.pop_all()


def _reshard_unit(wrapper: Any) -> None:
    wrapper._engine.layer(StateDictCalls).held.pop(wrapper._unit).close()


def _clean_names(messages: tuple[list[str], ...]) -> None:
    """Replace the names in messages about a load by the original ones."""
    for texts in messages:
        texts[:] = [clean(text) for text in texts]


def _own_storages(module: nn.Module) -> set[int]:
    """The addresses of the storages of this unit's parameters and buffers, not of nested units'."""
    tensors = [
        local_of(tensor)
        for own in own_modules(module).values()
        for tensor in (*own._parameters.values(), *own._buffers.values())
        if tensor is not None and tensor.layout is torch.strided
    ]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


# -------------------------------------------------- hooks of the wrapper: names without its prefix


def _remove_prefix(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    for key in _names_below(state, prefix):
        state[_original_name(key, prefix)] = state.pop(key)  # all of them, so that the order stays
    versions = getattr(state, "_metadata", {})
    for key in _names_below(versions, prefix):
        versions[_original_name(key + ".", prefix).removesuffix(".")] = versions.pop(key)


def _as_model_state_dict(wrapper: Any, state: Any, prefix: str, metadata: object) -> Any:
    if prefix:
        return None  # this is a part of another module's state dict, which stays an ordinary one
    copy = ModelStateDict(state)
    copy.wrapper_ref, copy._metadata = weakref.ref(wrapper), getattr(state, "_metadata", None)
    return copy


def _add_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for key in _names_below(state, prefix):
        state[prefix + WRAPPER_PREFIX + key.removeprefix(prefix)] = state.pop(key)


def _names_below(names: dict[str, Any], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _original_name(key: str, prefix: str) -> str:
    return prefix + key.removeprefix(prefix).removeprefix(WRAPPER_PREFIX)

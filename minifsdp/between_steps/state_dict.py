"""State dicts: the model as it would be without sharding.

``model.state_dict()`` has whole parameters under their original names, on every rank, as if nothing
had been wrapped; ``model.load_state_dict()`` takes such a dict. So checkpoints move between DDP, a
plain model and any number of ranks. Every rank has to call them: parameters are gathered together.

torch walks the tree of modules and calls hooks around each. The hooks on a *wrapped* module gather
its unit for as long as the walk is inside of it, so there are never more units out than lie within
each other, and ``model.module.state_dict()`` works as well. The hooks on the *wrapper* only take
its part out of the names. What is returned are copies, on the device that computes: writing to them
does not change the model. (A plain module returns its own tensors, which the next step changes.)

``torch.distributed.checkpoint.load({"model": model.state_dict()})`` is written for a plain module's
tensors: it changes them and is done. But a value that has a ``load_state_dict`` is told of what was
loaded, so the dict has one, and hands it to the model. If the dict itself is given to ``load``, it
is assigned what was loaded, entry by entry, and hands all of it to the model after the last.
"""

import sys
import weakref
from collections import OrderedDict
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from minifsdp.hooks import Hooks
from minifsdp.unit import Unit
from minifsdp.wrapping.module_tree import WRAPPER_PREFIX, clean, own_modules


class Wrapper(Protocol):
    """What is needed of a ``FullyShardedDataParallel``."""

    _unit: Unit
    _hooks: Hooks

    @property
    def module(self) -> nn.Module: ...

    def load_state_dict(self, state_dict: Any, strict: bool) -> Any: ...

    def summon_full_params(
        self, module: Any, recurse: bool, writeback: bool
    ) -> AbstractContextManager[None]: ...


def register_hooks(wrapper: Any) -> None:
    """Let ``wrapper`` save and load whole parameters, wherever in a tree of modules it is."""
    wrapper.register_state_dict_post_hook(_shorten_names)
    wrapper._register_state_dict_hook(_hand_out)  # the only kind that may return another dict
    wrapper.register_load_state_dict_pre_hook(_lengthen_names)
    module, own = wrapper.module, weakref.ref(wrapper)  # the module may outlive its wrapper
    module.register_state_dict_pre_hook(partial(_before_save, own))
    module.register_state_dict_post_hook(partial(_after_save, own))
    module.register_load_state_dict_pre_hook(partial(_before_load, own))
    module.register_load_state_dict_post_hook(partial(_after_load, own))


Own = weakref.ref[Wrapper]


class Copies(OrderedDict[str, Any]):
    """What a wrapper's ``state_dict()`` returns. Saved and copied as an ordinary dict."""

    own: "Own | None" = None
    _metadata: Any = None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == _LOADER and frame.f_locals["keys"][-1] == key:
            self._load()  # dcp.load(model.state_dict()): this was the last entry

    def state_dict(self) -> "OrderedDict[str, Any]":
        """What torch.distributed.checkpoint saves, and writes into."""
        return OrderedDict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It has been written into: the model takes it."""
        self.update(state)
        self._load()

    def _load(self) -> None:
        wrapper = self.own() if self.own is not None else None
        if wrapper is not None:
            wrapper.load_state_dict(self, strict=False)  # a program may have added entries

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def refuse_full_options() -> None:
    """Refuse to list flat parameters to set_model_state_dict() where it would deal out whole ones
    by their names.

    Raises:
        NotImplementedError: on every rank, for all of them ask.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") == _ASKER:
        info: Any = frame.f_locals.get("info")
        if frame.f_code.co_name == "_load_model_state_dict" and (
            info.full_state_dict or info.broadcast_from_rank0
        ):
            raise NotImplementedError(
                "minifsdp: set_model_state_dict() with full_state_dict=True or "
                "broadcast_from_rank0=True is not there yet. Give the whole state dict to every "
                "rank, without these options: model.load_state_dict(state_dict). Or load it on "
                "rank 0 before wrapping, and wrap with sync_module_states=True."
            )
        frame = frame.f_back


_LOADER = "torch.distributed.checkpoint.state_dict_loader"
_ASKER = "torch.distributed.checkpoint.state_dict"


def _before_save(own: Own, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _enter(own, module, writeback=False)


def _after_save(
    own: Own, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}  # a parameter with two names stays one tensor
    memory = _own_memory(module)
    for key in _below(state, prefix):
        value = state[key]
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in memory:
            place = (value.data_ptr(), value.shape, value.dtype)
            copies.setdefault(place, value.detach().clone())
            state[key] = copies[place]
    _leave(own, module)


def _before_load(
    own: Own,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    _enter(own, module, True, missing, unexpected, errors)


def _after_load(own: Own, module: nn.Module, incompatible: object) -> None:
    _leave(own, module)


def _shorten_names(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    for key in _below(state, prefix):
        state[_unwrapped(key, prefix)] = state.pop(key)  # each one, so that the order stays
    versions = getattr(state, "_metadata", {})
    for key in _below(versions, prefix):
        versions[_unwrapped(key + ".", prefix).removesuffix(".")] = versions.pop(key)


def _hand_out(wrapper: Any, state: Any, prefix: str, metadata: object) -> Any:
    if prefix:
        return None  # it is part of another module's
    copies = Copies(state)
    copies.own, copies._metadata = weakref.ref(wrapper), getattr(state, "_metadata", None)
    return copies


def _lengthen_names(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for key in _below(state, prefix):
        state[prefix + WRAPPER_PREFIX + key.removeprefix(prefix)] = state.pop(key)


def _enter(own: Own, module: nn.Module, writeback: bool, *found: list[str]) -> None:
    wrapper = own()
    if wrapper is None or wrapper.module is not module:
        return  # a module that has outlived its wrapper, or a copy of it
    hooks = wrapper._hooks
    hooks.state_dict_calls.close_dead(wrapper._unit)
    with ExitStack() as stack:
        stack.callback(_clean_all, found)
        stack.enter_context(wrapper.summon_full_params(wrapper, recurse=False, writeback=writeback))
        hooks.state_dict_calls.held[wrapper._unit] = stack.pop_all()


def _leave(own: Own, module: nn.Module) -> None:
    wrapper = own()
    if wrapper is not None and wrapper.module is module:
        wrapper._hooks.state_dict_calls.held.pop(wrapper._unit).close()


def _clean_all(found: tuple[list[str], ...]) -> None:
    """What is said about names says the original ones."""
    for texts in found:
        texts[:] = [clean(text) for text in texts]


def _own_memory(module: nn.Module) -> set[int]:
    """Where the parameters and buffers are that no wrapper inside has."""
    return {
        tensor.untyped_storage().data_ptr()
        for own in own_modules(module).values()
        for tensor in (*own._parameters.values(), *own._buffers.values())
        if tensor is not None
    }


def _below(names: dict[str, Any], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def _unwrapped(key: str, prefix: str) -> str:
    return prefix + key.removeprefix(prefix).removeprefix(WRAPPER_PREFIX)

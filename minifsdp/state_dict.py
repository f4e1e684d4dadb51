"""State dicts: the model as it would be without sharding.

``model.state_dict()`` has whole parameters under their original names, on every rank, as if nothing
had been wrapped; ``model.load_state_dict()`` takes such a dict. So checkpoints move between DDP, a
plain model and any number of ranks. Every rank has to call them: parameters are gathered together.

torch walks the tree of modules and calls hooks around each. The ones here hold the parameters of a
wrapper's own unit for as long as the walk is inside of it, so there are never more units out than
lie within each other. What is returned are copies; they are where the parameters are computed with.
(A plain module returns its own tensors, which the next step changes.)
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch import Tensor, nn

from minifsdp.tree import WRAPPER_PREFIX, clean, own_modules
from minifsdp.unit import Unit


class Wrapper(Protocol):
    """What is needed of a ``FullyShardedDataParallel``."""

    _unit: Unit
    _walk: list[AbstractContextManager[Any]]  # the block that holds its unit, during a walk

    @property
    def module(self) -> nn.Module: ...

    def summon_full_params(
        self, module: Any, recurse: bool, writeback: bool
    ) -> AbstractContextManager[None]: ...


def register_hooks(wrapper: nn.Module) -> None:
    """Let ``wrapper`` save and load whole parameters, wherever in a tree of modules it is."""
    wrapper.register_state_dict_pre_hook(_before_save)  # type: ignore[no-untyped-call]
    wrapper.register_state_dict_post_hook(_after_save)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]


def _before_save(wrapper: Wrapper, prefix: str, keep_vars: bool) -> None:
    _enter(wrapper, False)


def _after_save(wrapper: Wrapper, state: dict[str, Any], prefix: str, metadata: object) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}  # a parameter with two names stays one tensor
    own = _own_memory(wrapper.module)
    for key in _below(state, prefix):
        value = state.pop(key)  # and put back: so that the order stays
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in own:
            place = (value.data_ptr(), value.shape, value.dtype)
            copies.setdefault(place, value.detach().clone())
            value = copies[place]
        state[_unwrapped(key, prefix)] = value
    versions = getattr(state, "_metadata", {})
    for key in _below(versions, prefix):
        versions[_unwrapped(key + ".", prefix).removesuffix(".")] = versions.pop(key)
    _leave(wrapper)


def _before_load(
    wrapper: Wrapper,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    _enter(wrapper, True, missing, unexpected, errors)
    for key in _below(state, prefix):
        state[prefix + WRAPPER_PREFIX + key.removeprefix(prefix)] = state.pop(key)


def _after_load(wrapper: Wrapper, incompatible: object) -> None:
    _leave(wrapper)


def _enter(wrapper: Wrapper, writeback: bool, *found: list[str]) -> None:
    with ExitStack() as stack:
        stack.callback(_clean_all, found)
        stack.enter_context(wrapper.summon_full_params(wrapper, recurse=False, writeback=writeback))
        wrapper._walk.append(stack.pop_all())


def _leave(wrapper: Wrapper) -> None:
    wrapper._walk.pop().__exit__(None, None, None)


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

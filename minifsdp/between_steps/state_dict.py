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
``model.module.state_dict()`` works as well. The values are copies, on the device that computes:
writing to them does not change the model. (A plain module returns its own tensors, which the next
step changes.)

``torch.distributed.checkpoint.load({"model": model.state_dict()})`` changes the values in place,
which is enough for a plain module. If a value has a method ``load_state_dict``, torch calls it
afterwards. So the dict that is returned here has one, which loads the values into the model. If the
dict itself is given to ``load``, torch assigns to its entries, one by one; the dict then loads all
of them into the model after the last one.
"""

import sys
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn

from minifsdp.between_steps.full_params import Options, full_params
from minifsdp.wrapping.attributes import ModuleWrapper
from minifsdp.wrapping.module_tree import WRAPPER_PREFIX, clean, own_modules


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


WrapperRef = weakref.ref[ModuleWrapper]


class ModelStateDict(OrderedDict[str, Any]):
    """What ``state_dict()`` of a wrapped model returns. It is saved and copied as an ordinary dict.

    Attributes:
        wrapper_ref: the model that it was made from.
    """

    wrapper_ref: "WrapperRef | None" = None
    _metadata: Any = None

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == _LOADER and frame.f_locals["keys"][-1] == key:
            self._load()  # dcp.load(model.state_dict()): this was the last entry

    def state_dict(self) -> "OrderedDict[str, Any]":
        """The dict that torch.distributed.checkpoint saves, and writes into."""
        return OrderedDict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what torch.distributed.checkpoint has written into the model."""
        self.update(state)
        self._load()

    def _load(self) -> None:
        wrapper = self.wrapper_ref() if self.wrapper_ref is not None else None
        if wrapper is not None:
            wrapper.load_state_dict(self, strict=False)  # a program may have added entries

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def refuse_full_options() -> None:
    """Refuse the options of torch's set_model_state_dict() that would distribute unsharded values
    to flat parameters, by their names.

    Raises:
        NotImplementedError: that function is among the callers, with such an option. All ranks
            call it, so all of them raise this.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "") == _SETTER:
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
_SETTER = "torch.distributed.checkpoint.state_dict"


# ----------------------------------------------- hooks of the wrapped module: unshard and reshard


def _before_save(ref: WrapperRef, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    _unshard_unit(ref, module, writeback=False)


def _after_save(
    ref: WrapperRef, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
) -> None:
    copies: dict[tuple[object, ...], Tensor] = {}  # a parameter with two names stays one tensor
    storages = _own_storages(module)
    for key in _names_below(state, prefix):
        value = state[key]
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages:
            place = (value.data_ptr(), value.shape, value.dtype)
            copies.setdefault(place, value.detach().clone())
            state[key] = copies[place]
    _reshard_unit(ref, module)


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
    _unshard_unit(ref, module, True, missing, unexpected, errors)


def _after_load(ref: WrapperRef, module: nn.Module, incompatible: object) -> None:
    _reshard_unit(ref, module)


def _unshard_unit(
    ref: WrapperRef, module: nn.Module, writeback: bool, *messages: list[str]
) -> None:
    wrapper = ref()
    if wrapper is None or wrapper.module is not module:
        return  # the wrapper is gone, or ``module`` is a copy of the wrapped one
    unit, calls = wrapper._unit, wrapper._hooks.state_dict_calls
    calls.close_aborted(unit)
    with ExitStack() as stack:
        stack.callback(_clean_names, messages)
        options = Options(writeback=writeback)
        stack.enter_context(full_params(wrapper._hooks, [unit], options))
        calls.held[unit] = stack.pop_all()


def _reshard_unit(ref: WrapperRef, module: nn.Module) -> None:
    wrapper = ref()
    if wrapper is not None and wrapper.module is module:
        wrapper._hooks.state_dict_calls.held.pop(wrapper._unit).close()


def _clean_names(messages: tuple[list[str], ...]) -> None:
    """Replace the names in messages about a load by the original ones."""
    for texts in messages:
        texts[:] = [clean(text) for text in texts]


def _own_storages(module: nn.Module) -> set[int]:
    """The addresses of parameters and buffers of this unit, without those of nested units."""
    return {
        tensor.untyped_storage().data_ptr()
        for own in own_modules(module).values()
        for tensor in (*own._parameters.values(), *own._buffers.values())
        if tensor is not None
    }


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

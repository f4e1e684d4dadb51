"""A pytree with other tensors: what a module takes or returns, cast or moved."""

# Not torch.utils._pytree: it looks into no dataclass or other object that was not registered with
# it, and copies what has nothing to replace.

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with each tensor in its tuples, lists, dicts and dataclasses replaced by
    ``function(tensor)``.

    The caller's objects are not changed: an object with a new tensor in it is copied, and any other
    is the same object as before. Where an object contains itself, that reference stays as it is.
    """
    return _map(function, value, ())


def _map(function: Callable[[Tensor], Tensor], value: Any, parents: tuple[int, ...]) -> Any:
    # parents: the ids of the objects that `value` is in, without which a circle would never end.
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in parents:
        return value
    parents = (*parents, id(value))
    if isinstance(value, (list, tuple)):
        items = [_map(function, item, parents) for item in value]
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes  # an RNN refuses them on a device other than the CPU
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        parts = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        return value
    changed = {key: _map(function, part, parents) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    result = copy.copy(value)
    for key, part in changed.items():
        if isinstance(result, dict):
            result[key] = part  # not update(), which transformers' ModelOutput refuses
        else:
            object.__setattr__(result, key, part)  # the dataclass may be frozen
    return result

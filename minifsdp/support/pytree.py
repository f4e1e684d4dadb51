"""The tensors in whatever a module takes or returns.

A unit's backward begins when a gradient reaches one of its outputs, so every output has to be
found, wherever it hides. One that is missed would find its unit's parameters freed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in a nest of tuples, lists, sets, dicts, dataclasses and plain objects, in no
    particular order. Circles end; modules are not looked into."""
    stack, seen = [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif item is None or isinstance(item, (str, bytes, int, float, type, nn.Module)):
            continue
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            elif is_dataclass(item):
                stack.extend(getattr(item, field.name) for field in fields(item))
            elif hasattr(item, "__dict__"):
                stack.extend(vars(item).values())


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with each tensor in its tuples, lists, dicts and dataclasses replaced. Nothing that
    the caller holds is changed; what has no such tensor in it is the same object as before. Where
    something is inside of itself, that stays as it is."""
    return _map(function, value, ())


def _map(function: Callable[[Tensor], Tensor], value: Any, around: tuple[int, ...]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if id(value) in around:
        return value
    around = (*around, id(value))
    if isinstance(value, (list, tuple)):
        items = [_map(function, item, around) for item in value]
        if isinstance(value, PackedSequence):
            items[1] = value.batch_sizes  # on the CPU, and an RNN wants it there
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, dict):
        parts = dict(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
    else:
        return value
    changed = {key: _map(function, part, around) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    result = copy.copy(value)
    for key, part in changed.items():
        if isinstance(result, dict):
            result[key] = part  # not update(), which some refuse, as transformers' ModelOutput
        else:
            object.__setattr__(result, key, part)  # the dataclass may be frozen
    return result

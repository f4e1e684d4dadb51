"""The tensors in whatever a module takes or returns.

A unit's backward begins when a gradient reaches one of its outputs, so every output has to be
found, wherever it hides. One that is missed would find its unit's parameters freed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor, nn


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

"""The tensors in what a module takes or returns.

A unit's backward begins when a gradient reaches one of its outputs, so every output has to be
found, however deep it is in other objects::

    ModelOutput(loss=t1, states=[(t2, {"mask": t3})])    ->    t1, t2, t3

The backward of an output that is missed would find its unit's parameters freed.
"""

# Not torch.utils._pytree: it looks into no dataclass or other object that was not registered with
# it, and does not end where an object contains itself.

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor, nn


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in ``value``: in tuples, lists, sets, dicts, dataclasses and other objects with
    attributes, nested in any way, in no particular order.

    An object that contains itself is looked into once; modules are not looked into.
    """
    stack, seen = [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
        elif item is None or isinstance(item, (str, bytes, int, float, type, nn.Module)):
            continue
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, (list, tuple, set, frozenset)):
                stack.extend(item)
            elif isinstance(item, Mapping):
                stack.extend(item.values())
            elif is_dataclass(item):
                stack.extend(getattr(item, field.name) for field in fields(item))
            elif hasattr(item, "__dict__"):
                stack.extend(vars(item).values())

"""What operators return, remembered.

A training step calls the same operators on tensors of the same shapes again and again, and tensors
on ``meta`` are nothing but shapes. To ask torch for the shape of a result is most of what a run
takes. So it is asked once, and from then on new tensors like those are made. torch's own
``FakeTensorMode`` has such a cache, for the same reason.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from minifsdp.support.pytree import tensors_in


class Results:
    """Of operators on ``meta`` that do nothing but make new tensors, by what they are given."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type, list[tuple[Any, ...]]]] = {}

    def of(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """What ``operation(*args, **kwargs)`` returns."""
        key = operation, _described(args), _described(tuple(kwargs.items()))
        if key in self._known:
            kind, shapes = self._known[key]
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                for shape, stride, dtype in shapes
            ]
            return made[0] if kind is Tensor else kind(made)
        result = operation(*args, **kwargs)
        made = [result] if type(result) is Tensor else result
        if not operation._schema.is_mutable and _all_new(made, [*tensors_in((args, kwargs))]):
            self._known[key] = type(result), [(t.shape, t.stride(), t.dtype) for t in made]
        return result


def _described(value: Any) -> Hashable:
    """All of an argument that a result depends on. Of a tensor its values are not: it has none."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return type(value), value if isinstance(value, Hashable) else object()  # like no other


def _all_new(made: Any, given: list[Tensor]) -> bool:
    """Whether these are tensors on ``meta``, each with memory of its own."""
    if type(made) not in (tuple, list) or not all(type(tensor) is Tensor for tensor in made):
        return False
    memory = {tensor.untyped_storage()._cdata for tensor in (*given, *made)}
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    return len(memory - theirs) == len(made) and all(tensor.is_meta for tensor in made)

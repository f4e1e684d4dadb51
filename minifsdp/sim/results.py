"""What operators return, remembered.

A training step calls the same operators on tensors of the same shapes again and again, and tensors
on ``meta`` are nothing but shapes. To ask torch for the shape of a result is most of what a run
takes. So it is asked once, and from then on new tensors like those are made. torch's own
``FakeTensorMode`` has such a cache, for the same reason.

Large tensors in the host's memory, with offload, do have values, which nobody looks at: gigabytes
of parameters and of an optimizer's state. These are not computed either. Small ones are: Adam
counts its steps in them.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from minifsdp.core.outputs import tensors_in

ITEM = torch.ops.aten._local_scalar_dense.default
LARGE = 2**20  # bytes


class Results:
    """Of operators on ``meta`` that do nothing but make new tensors, by what they are given."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[type, list[tuple[Any, ...]]]] = {}

    def of(
        self, operation: Any, args: Any, kwargs: Any, read: list[Tensor], written: list[Tensor]
    ) -> Any:
        """What ``operation(*args, **kwargs)`` returns. It reads and writes these tensors."""
        if any(tensor.is_meta for tensor in read):
            if operation is ITEM:
                return 1.0  # there is no value; whoever asks gets one to go on with
            if any(tensor.device.type == "cpu" for tensor in written):
                return args[0]  # a copy to the host
            target = kwargs.get("device")
            if target is not None and torch.device(target).type == "cpu":
                return torch.empty_like(args[0], device="cpu", dtype=kwargs.get("dtype"))
        elif _is_large_on_the_host(args, kwargs):
            return self._on_the_host(operation, args, kwargs)
        return self._remembered(operation, args, kwargs)

    def _remembered(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if _returns_aliases(operation):  # most do; nothing new is made
            return operation(*args, **kwargs)
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
        if _all_new(made, [*tensors_in((args, kwargs))]):
            self._known[key] = type(result), [(t.shape, t.stride(), t.dtype) for t in made]
        return result

    def _on_the_host(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """New memory, which nobody writes to; or what was there, as it is."""
        mutates = operation._schema.is_mutable
        if _returns_aliases(operation):
            return args[0] if mutates else operation(*args, **kwargs)
        if mutates:  # a list, in place
            return None

        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        result = self._remembered(operation, *tree_map_only(Tensor, _on_meta, (args, kwargs)))
        return tree_map_only(Tensor, _like_in_host_memory, result)


@cache
def _returns_aliases(operation: Any) -> bool:
    """Whether it returns a view, or what it has changed in place."""
    return any(value.alias_info is not None for value in operation._schema.returns)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _like_in_host_memory(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return new if new.nbytes >= LARGE else new.fill_(1)  # may be looked at


def _is_large_on_the_host(args: Any, kwargs: Any) -> bool:
    """Whether an operator is about the host's memory alone, and about much of it."""
    if args and isinstance(args[0], Tensor) and args[0].is_meta:  # as a rule
        return False
    tensors = [*tensors_in((args, kwargs))]
    here = all(tensor.device.type == "cpu" for tensor in tensors)
    stays = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return here and stays and any(tensor.nbytes >= LARGE for tensor in tensors)


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

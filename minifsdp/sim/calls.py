"""Operators as they are called: which memory is read, which is written, which is new.

torch says it itself: an operator's *schema* marks arguments that it writes to, and results that are
views of arguments.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from minifsdp.core.outputs import tensors_in

NO_WORK = ("empty", "empty_like", "empty_strided", "new_empty")
"""Operators that make a tensor and do nothing."""


@dataclass
class Call:
    """An operator that has just run."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: list[Tensor]
    written: list[Tensor]  # that were there before
    made: list[Tensor]
    result: Any

    @property
    def name(self) -> str:
        """In torch's words, without the namespace."""
        name: str = self.operation.overloadpacket.__name__
        return name

    @property
    def used(self) -> list[Tensor]:
        """All tensors that it reads or writes."""
        return [*self.read, *self.written, *self.made]

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        return sum(map(nbytes, self.used))

    @property
    def blocks(self) -> bool:
        """For a copy from or to the host: whether the host waits for it."""
        asynchronous = self.kwargs.get("non_blocking") or self.args[2:] == (True,)  # of a copy_
        return not (asynchronous and self.name in ("copy_", "_to_copy"))


def nbytes(tensor: Tensor) -> int:
    """That a kernel reads or writes of it. What is expanded is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize if tensor.numel() else 0


def accesses(operation: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and those that it writes to, by its schema."""
    found: dict[str, list[Tensor]] = {"read": [], "written": []}
    for place, (name, how) in enumerate(_arguments(operation)):
        value = args[place] if place < len(args) else kwargs.get(name)
        if how and isinstance(value, (Tensor, list, tuple)):
            found[how].extend(tensors_in(value))
    return found["read"], found["written"]


@cache  # a step calls a few dozen operators ten thousand times
def _arguments(operation: Any) -> list[tuple[str, str]]:
    """The names of its arguments, and what is done with each: "" for what becomes a view."""

    def how(argument: Any) -> str:
        if operation.namespace == "c10d":
            return "read" if argument.name.startswith("input") else "written"
        if argument.alias_info is None:
            return "read"
        return "written" if argument.alias_info.is_write else ""

    return [(argument.name, how(argument)) for argument in operation._schema.arguments]

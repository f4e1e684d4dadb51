"""The name of a flat parameter, for programs that choose parameters by name.

Loops such as this one freeze the layers of a plain model::

    for name, param in model.named_parameters():
        param.requires_grad = "head" in name or name.endswith("bias")

A sharded model lists one flat parameter for each unit, named ``blocks.0._flat_param``. It stands
for all parameters of the unit, and its name does not contain theirs: the loop would choose others
than it was written for, and nothing would fail. So the name is a ``str`` that knows the names it
stands for, and warns when the answer to a question is no, and would be yes for one of them.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from minifsdp.support.flat_parameter import FlatParameter

Named = tuple[str, nn.Parameter]


def with_flat_names(parameters: Iterable[Named]) -> Iterator[Named]:
    """The same, in which names of flat parameters warn of questions that they cannot answer."""
    warned: set[object] = set()  # of one listing, so that a loop over it is told once
    for name, param in parameters:
        yield FlatName(name, param, warned) if isinstance(param, FlatParameter) else name, param


class FlatName(str):
    """A fully qualified name, of a flat parameter.

    Args:
        name: as a string.
        param: that it is the name of.
        warned: questions that have been warned of.
    """

    param: FlatParameter
    warned: set[object]

    def __new__(cls, name: str, param: FlatParameter, warned: set[object]) -> "FlatName":
        self = super().__new__(cls, name)
        self.param, self.warned = param, warned
        return self

    @property
    def originals(self) -> list[str]:
        """Fully qualified names of the parameters that the flat one stands for."""
        path, dot, _ = self.rpartition(".")
        return [path + dot + info.name for info in getattr(self.param.unit(), "param_infos", ())]

    def __reduce__(self) -> Any:
        return str, (str(self),)  # what is saved or sent is an ordinary name

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        return self._answer(str.__contains__, part)

    def startswith(self, *start: Any) -> bool:
        return self._answer(str.startswith, *start)

    def endswith(self, *end: Any) -> bool:
        return self._answer(str.endswith, *end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._answer(str.__eq__, other)

    def __ne__(self, other: object) -> bool:
        return not (isinstance(other, str) and self._answer(str.__eq__, other))

    __hash__ = str.__hash__  # Python removes it from a class that defines __eq__

    def _answer(self, question: Callable[..., Any], *args: Any) -> bool:
        answer: bool = question(self, *args)
        if not answer and args not in self.warned:
            meant = [name for name in self.originals if question(name, *args)]
            if meant:
                self.warned.add(args)
                warnings.warn(
                    f"a program chooses parameters by name ({args[0]!r}), as is right for "
                    f"{meant[0]!r}. But that is a part of the flat parameter {str(self)!r} now, "
                    f"which is trained or frozen as a whole, and whose name says nothing of it. "
                    f"Choose parameters before you wrap the model, and wrap in units of their own "
                    f"what should be treated differently.",
                    stacklevel=3,
                )
        return answer

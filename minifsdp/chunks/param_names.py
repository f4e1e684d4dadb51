"""Names of parameters, for programs that choose parameters by name.

A wrapper lists parameters under their names from before wrapping. A program may also make names
itself, with those of wrappers in them, and then choose the parameters whose names are in both::

    model.named_parameters()                             blocks.0.linear.weight
    going through named_children(), as Trainer does      blocks.0._fsdp_wrapped_module.linear.weight

So a name equals each way to write it.

Such a loop freezes all of a plain model but its head and its biases::

    for name, param in model.named_parameters():
        param.requires_grad = "head" in name or name.endswith("bias")

A sharded model lists one flat parameter for each unit, with a name such as
``blocks.0._flat_param``. It stands for all parameters of the unit, and the names of these are not
in its own name: the loop would choose other parameters than before, and nothing would fail. So the
name is a ``str`` that knows the original names. If the answer to a question is no, and would be yes
for one of those, the name warns::

    name                  blocks.0._flat_param
    original names        blocks.0.linear.weight, blocks.0.linear.bias
    name.endswith("bias")    False, with a warning: True for blocks.0.linear.bias
    "blocks" in name         True, without a warning

This runs when parameters are listed, never in a step.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from minifsdp.chunks.flat_parameter import FlatParameter
from minifsdp.wrapping.module_tree import clean

Named = tuple[str, nn.Parameter]


def as_before_wrapping(parameters: Iterable[Named]) -> Iterator[Named]:
    """The same parameters, under their names from before wrapping: each an :class:`OriginalName`,
    or a :class:`FlatName`."""
    warned: set[object] = set()  # shared, so that a loop over all parameters is warned once
    for name, param in parameters:
        cleaned = clean(name)
        if isinstance(param, FlatParameter):
            yield FlatName(cleaned, param, warned), param
        else:
            yield OriginalName(cleaned), param


class OriginalName(str):
    """A fully qualified name as it was before wrapping. It equals one with the names of wrappers in
    it, too. In a ``set`` or as a key it is the plain string."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and str.__eq__(self, clean(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__  # Python removes it from a class that defines __eq__

    def __reduce__(self) -> Any:
        return str, (str(self),)  # saved or sent, it is an ordinary string


class FlatName(OriginalName):
    """The fully qualified name of a flat parameter.

    Args:
        name: as a string.
        param: the flat parameter.
        warned: arguments of questions that the user has been warned of.

    Warns:
        UserWarning: ``in``, ``startswith``, ``endswith``, ``==`` or ``!=`` finds no match, but
            would find one in an original name.
    """

    param: FlatParameter
    warned: set[object]

    def __new__(cls, name: str, param: FlatParameter, warned: set[object]) -> "FlatName":
        self = super().__new__(cls, name)
        self.param, self.warned = param, warned
        return self

    @property
    def originals(self) -> list[str]:
        """Fully qualified names of the parameters that are laid end to end in the flat one."""
        path, dot, _ = self.rpartition(".")
        return [path + dot + info.name for info in getattr(self.param.unit(), "param_infos", ())]

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        return self._answer(str.__contains__, part)

    def startswith(self, *start: Any) -> bool:
        return self._answer(str.startswith, *start)

    def endswith(self, *end: Any) -> bool:
        return self._answer(str.endswith, *end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self._answer(str.__eq__, clean(other))

    def __ne__(self, other: object) -> bool:  # so that the warning is about the caller's line
        return not (isinstance(other, str) and self._answer(str.__eq__, clean(other)))

    __hash__ = str.__hash__

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
                    f"With use_orig_params=True each parameter keeps its name. Or choose before "
                    f"you wrap the model, and wrap in units of their own what should differ.",
                    stacklevel=3,
                )
        return answer

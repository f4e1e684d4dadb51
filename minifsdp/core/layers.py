"""Layers: what a training needs beside sharding, each thing in a file of its own.

An engine gathers units, frees them, and reduces their gradients, which is all of FSDP. A layer
observes it, or checks what a program does: ranks that have to do the same, parameters that were
changed too early, a user's hooks on gradients. It overrides the *moments* at which it has something
to do. When the layers of a root are known, the methods that they override are collected, moment by
moment. So a moment that no layer overrides costs no call, and a layer that is not there costs
nothing.

The moments of a step, in their order::

    enter                      a forward may be about to begin that is not part of another
    start                      the outermost forward begins, or a look at parameters between steps
      before_forward           a unit's module is about to run; the unit is not gathered yet
      gathered                 the module has its parameters
      inputs                   ... and gets its arguments
      around_forward           ... runs, in this context
      error                    ... has raised a RuntimeError
      after_forward            ... has run; the unit is still gathered
    end_of_forward             the outermost forward is about to return
    enter_backward             a backward is about to begin
    start_backward             ... has begun
      before_backward          the first gradient has reached a unit, which is not gathered yet
      again                    another gradient has, by another of its outputs
      gradient                 the unit's gradient is complete; the unit is still gathered
    end_of_backward            autograd has nothing left to do; reductions are still under way
    complete                   the optimizer's gradients are there
    idle                       control returns to the program

    freed                      the last reason to keep a unit is gone, so it was freed
    reset                      what the last step has left is dropped: at each start and failure
    failed                     a forward or a backward has failed
    broken                     an exception has just ended a backward; `failed` follows, when the
                               next step notices it (the core notices it only then; who calls
                               this moment is minifsdp's support/broken_backward.py)

features.py has minifsdp's layers, in their order. They are called in that order, and after a
forward in its reverse. ``print(model.engine.moments)`` shows who is called when.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .unit_state import Purpose


class Call:
    """One forward of a unit. There may be several before the backward of the first.

    Attributes:
        module: the one that runs: the unit's or, if the unit has several (a list), one of them.
        in_order: this forward comes in the order of a step, which predicts that of the next step.
            Not so in a checkpoint that runs a part again, for example.
        outermost: it is not part of another forward, nor of a backward.
        unsharded: what the module computes with.
        first: autograd's number for the first operation that may be recorded in it.
        notes: what layers want to find again in its backward, each under a name of its own.
    """

    __slots__ = ("first", "in_order", "module", "notes", "outermost", "unit", "unsharded")

    def __init__(self, unit: Any, module: nn.Module, in_order: bool, outermost: bool) -> None:
        self.unit, self.module, self.in_order, self.outermost = unit, module, in_order, outermost
        self.unsharded = unit.unsharded
        self.first: int = torch._C._autograd._get_sequence_nr()
        self.notes: dict[str, Any] = {}


Chain = tuple[Call, ...]
"""A call and the calls that it is inside of, outermost first."""


class Layer:
    """Does nothing at any moment. A layer overrides those that concern it."""

    def enter(self, unit: Any) -> None:
        """``unit`` is the root, or is called outside of any other forward."""

    def start(self, purpose: Purpose) -> None:
        """Nothing is under way. What this raises ends the forward before it has begun."""

    def before_forward(self, call: Call) -> None: ...

    def gathered(self, call: Call) -> None: ...

    def inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the arguments to call the module with."""
        return args, kwargs

    def around_forward(self, call: Call) -> AbstractContextManager[object]:
        """Returns the context in which the module runs."""
        raise NotImplementedError

    def error(self, call: Call, error: RuntimeError) -> None:
        """May raise an error in place of ``error`` that says more."""

    def after_forward(self, call: Call, output: Any) -> Any:
        """Returns the output to go on with."""
        return output

    def end_of_forward(self, unit: Any) -> None:
        """``unit``: whose module is the outermost that ran."""

    def enter_backward(self) -> None:
        """What this raises ends the backward before it has begun."""

    def start_backward(self, call: Call | None) -> None:
        """``call``: the one that a gradient has come to first; None if it has come past the outputs
        of all units."""

    def before_backward(self, call: Call) -> None: ...

    def again(self, call: Call) -> None: ...

    def gradient(self, unit: Any, grad: Any) -> Any:
        """Returns the gradient to go on with, ``[padded_numel]``. That may be ``grad``, and if it
        is a tensor it may be written to."""
        return grad

    def end_of_backward(self) -> None: ...

    def complete(self, reductions: Sequence[Any]) -> None:
        """``reductions``: all of this backward (reduce.py), in their order. Do not keep them: their
        results are memory."""

    def idle(self, graph: bool) -> None:
        """``graph``: after a forward with gradients, of which a backward may follow."""

    def freed(self, unit: Any) -> None: ...

    def reset(self) -> None: ...

    def failed(self) -> None: ...

    def broken(self) -> None: ...


class Moments:
    """The layers of one root. By the name of each moment, the methods that they override::

    for method in moments.gathered:
        method(call)
    """

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self.layers = tuple(layers)
        for moment, inherited in vars(Layer).items():
            if not moment.startswith("_"):
                own = (x for x in self.layers if getattr(type(x), moment) is not inherited)
                self.__dict__[moment] = tuple(getattr(layer, moment) for layer in own)
        self.__dict__["after_forward"] = self.after_forward[::-1]

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]: ...

    def run(self, call: Call, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``run(*args, **kwargs)``, in the contexts of the layers, which hear of an error."""
        try:
            if len(self.around_forward) == 1:  # as a rule
                with self.around_forward[0](call):
                    return run(*args, **kwargs)
            with ExitStack() as stack:
                for method in self.around_forward:
                    stack.enter_context(method(call))
                return run(*args, **kwargs)
        except RuntimeError as error:
            for method in self.error:
                method(call, error)
            raise

    def __repr__(self) -> str:
        """Who is called when, a line for each moment."""
        lines = []
        for moment, methods in vars(self).items():
            if moment != "layers" and methods:
                names = [type(method.__self__).__name__ for method in methods]
                lines.append(f"{moment:<17}{', '.join(names)}")
        return "\n".join(lines)

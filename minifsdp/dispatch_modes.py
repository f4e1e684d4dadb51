"""Engine work inside of a user's ``TorchDispatchMode``.

A dispatch mode sees every operation that torch runs while it is active, and may replace its result.
Selective activation checkpointing is one: it keeps the results of some operations, and in the
recomputation it hands them out again, in the order in which they came::

    with mode:                       the mode sees
        y = model(x)                 mm, relu, mm          what the model computes
                                     copy_, clone, view    what the engine does to gather a unit

The second line does not belong to the model. It also differs from run to run: which message is
waited for where depends on which rank is late. So a checkpoint would hand out the wrong result, or
crash at random. So the engine does everything, at each of its moments, with modes off.

A mode with ``sees_engine = True`` in its class stays on. The virtual GPU is such a mode, since it
has to see all that is run on it. A tool that measures the engine may be another.

``torch.compile`` does not see the engine's work either. TorchDynamo is on in the forward of a
compiled module, and in a step that is compiled together with its backward and its optimizer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

F = TypeVar("F", bound=Callable[..., Any])
_SKIP = _FrameAction.SKIP


def without_modes(function: F) -> F:
    """Decorates what the engine does at one of its moments: no mode of a program sees it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # as a rule
            return function(*args, **kwargs)
        with _modes_off():
            return function(*args, **kwargs)

    never_compile_inside(call)
    return call  # type: ignore[return-value]


def never_compile(function: F) -> F:
    """Decorates a function of which Dynamo compiles no frame; it may compile what that calls."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_SKIP, _FrameAction.DEFAULT))
    return function


def never_compile_inside(function: F) -> F:
    """Decorates what autograd or an optimizer calls: Dynamo compiles neither a frame of it nor what
    it calls."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_SKIP, _SKIP))
    return function


@contextmanager
def _modes_off() -> Iterator[None]:
    off = []
    while (mode := _get_current_dispatch_mode()) and not getattr(mode, "sees_engine", False):
        off.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(off):
            _push_mode(mode)

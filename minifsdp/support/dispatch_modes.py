"""Engine work inside of a user's ``TorchDispatchMode``.

A dispatch mode sees every operation that torch runs while it is active, and may replace its result.
Selective activation checkpointing is one: it keeps the results of some operations, and in the
recomputation it hands them out again, in the order in which they came::

    with mode:                       the mode sees
        y = model(x)                 mm, relu, mm          what the model computes
                                     copy_, clone, view    what the engine does to gather a unit

The second line does not belong to the model. It also differs from run to run: which message is
waited for where depends on which rank is late. So a checkpoint would hand out the wrong result, or
crash at random. All that the engine does, at each of its moments, is done with modes off.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])


def without_modes(function: F) -> F:
    """Decorates what the engine does at one of its moments: no dispatch mode sees it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # as a rule
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]

"""What a check says of the code that it looks at: a list of observations.

    yield "shard(arange(5), rank=2, world_size=4)", shard(torch.arange(5), 2, 4)
    yield at_most("units alive in step 3", alive)

    yield close("the norm before clipping", norm)

The first kind has to be equal to what the reference gives, tensors in every bit, in dtype and in
shape. The second may be less. The third may differ by rounding, for what has several right orders
of additions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

reference = False
"""Whether this process says what is expected, so that no function of a student's is in it."""


class Seen(NamedTuple):
    """One observation. ``value`` is made of None, numbers, text, tensors, lists and dicts."""

    what: str
    value: Any
    rule: str = "equal"  # or "at most", "at least", "close to"
    slack: float = 0.0  # with a rule: as a part of the expected value


def at_most(what: str, value: float, slack: float = 0.0) -> Seen:
    """It must not be more than with the reference, times ``1 + slack``."""
    return Seen(what, value, "at most", slack)


def at_least(what: str, value: float, slack: float = 0.0) -> Seen:
    """It must not be less than with the reference, times ``1 - slack``."""
    return Seen(what, value, "at least", slack)


def close(what: str, value: Any, slack: float = 1e-5) -> Seen:
    """It must be what it is with the reference, but for rounding: each number of a tensor may
    differ by ``slack`` times the largest."""
    return Seen(what, value, "close to", slack)


def refused(call: Callable[[], object]) -> str:
    """The name of the exception that ``call`` raises, or that it raises none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "no exception"


def plain(value: Any) -> Any:
    """``value``, as it is sent to the judge: of types that can be read without running anything."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Size):
        return list(value)
    return str(value)  # a dtype, a member of an enum

"""``torch.compile`` around a wrapper: it compiles the modules, and not the engine.

TorchDynamo watches every Python function that runs inside of a compiled module. What the engine
does there (streams, collectives, hooks) is not for a compiler. So it looks away while the engine
runs, and looks again at what is wrapped, as it does where PyTorch's own FSDP is compiled.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
    set_eval_frame,
)

Callback = Any
"""Dynamo's own function that it has Python call, or None where nothing is being compiled."""


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper's ``forward(self, watcher, *args, **kwargs)`` as a module calls it. ``watcher`` is
    what :func:`watched` takes, or None: nothing is being compiled."""

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watcher = set_eval_frame(None)
        try:
            return forward(self, watcher, *args, **kwargs)
        finally:
            set_eval_frame(watcher)

    # Two ways to come here: as a function that is about to run, and as a call in one that is being
    # compiled.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(call.__code__, skip)  # type: ignore[attr-defined]
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def watched(module: nn.Module, watcher: Callback) -> Callable[..., Any]:
    """``module``, to be called where Dynamo looks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        set_eval_frame(watcher)
        try:
            return _called(module, args, kwargs)
        finally:
            set_eval_frame(None)

    return call


def _called(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # A function of its own: Dynamo looks at functions that begin, and not at those of torch.nn.
    return module(*args, **kwargs)

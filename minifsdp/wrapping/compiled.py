"""``torch.compile`` around a wrapper compiles the modules, and not the engine.

TorchDynamo intercepts every Python function that runs inside of a compiled module. What the engine
does there (streams, collectives, hooks) cannot be compiled. So Dynamo is switched off while the
engine runs, and on again for the wrapped module, as it is for PyTorch's own FSDP::

    compiled(model)  ->  wrapper.forward   Dynamo off: gather, hooks
                           module(...)     Dynamo on: compiled
                         the rest          Dynamo off: free

A module that was compiled before it was sharded keeps its old call. :func:`call_wrappers` replaces
that by a wrapper's call. After ``fully_shard`` the old call ends in ``FSDPModule._call_impl``.

``set_eval_frame`` is Dynamo's own switch: it sets the callback and returns the previous one.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame

from minifsdp.dispatch_modes import never_compile

Callback = Any
"""The function that Dynamo has Python call for each frame; None where nothing is being compiled."""


def uncompiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a wrapper's ``forward(self, callback, *args, **kwargs)``: torch calls it without
    ``callback``, and it runs with Dynamo off. ``callback`` is for :func:`compiled`; None means that
    nothing is being compiled."""

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        callback = set_eval_frame(None)
        if callback is None:
            return forward(self, None, *args, **kwargs)
        try:
            return forward(self, callback, *args, **kwargs)
        finally:
            set_eval_frame(callback)

    # Dynamo meets `call` in two ways: as a frame that is about to run (the strategy is for that),
    # and as a call in a function that it is compiling (the attribute is for that).
    never_compile(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_compiling() -> bool:
    """Whether Dynamo would compile a function that is called now. False in a function that it is
    compiling already. (Not traced: with ``fullgraph=True`` Dynamo would refuse that.)"""
    return get_eval_frame_callback() is not None


def compiled(module: Any, callback: Callback) -> Callable[..., Any]:
    """A function that calls ``module``, or a method of one, with Dynamo on."""

    call_module = _call_module_of(type(getattr(module, "__self__", module)))

    def call(*args: Any, **kwargs: Any) -> Any:
        set_eval_frame(callback)
        try:
            return call_module(module, args, kwargs)
        finally:
            set_eval_frame(None)

    return call


def _call_module(module: Any, args: Any, kwargs: Any) -> Any:
    # A function of its own: Dynamo compiles functions that begin while it is on, but not those of
    # torch.nn, such as the module's __call__.
    return module(*args, **kwargs)


def _call_module_of(cls: type) -> Any:
    """:func:`_call_module` for modules of a class. Dynamo counts how often it has compiled a code
    object, and gives up after eight times (``recompile_limit``). That is too few for all units of a
    model. So each class has a code object of its own, as in a plain model."""
    if cls not in _CALLS:
        code = _call_module.__code__.replace(co_name=f"call_{cls.__name__}")
        _CALLS[cls] = FunctionType(code, globals())
    return _CALLS[cls]


_CALLS = WeakKeyDictionary[type, Any]()


def call_wrappers(root: nn.Module) -> None:
    """``torch.compile(block)`` remembers how to call ``block``. Where a wrapper has taken the place
    of ``block``, look again: the remembered call would run it without its parameters."""
    for module in root.modules():
        # First whether it is compiled: modules of torch.jit have no plain dictionary of modules.
        if "dynamo_ctx" in module.__dict__ and "_unit" in vars(module._modules["_orig_mod"]):
            initialize: Any = module._initialize
            initialize()

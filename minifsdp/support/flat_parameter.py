"""The parameter that the optimizer sees: one chunk of a unit, under the name of a parameter.

Much of what a training script does with parameters is right for chunks: an element-wise optimizer,
a sum of gradients, ``clip_grad_value_``. Some of it takes a chunk for a whole parameter, and is
wrong without a word: a norm, a look for inf and NaN. Nobody tells a parameter what is done with it;
but it is asked for its gradient, and the one who asks can be seen on the stack::

    torch.nn.utils.clip_grad_norm_, get_total_norm     refused: model.clip_grad_norm_ is right
    torch.amp.GradScaler                               refused: see grad_scaler.py
    a function of yours that takes some norm           warned, once for each place

The last may add up over ranks by hand, and be right. What cannot be seen: a norm written as squares
and sums, and gradients that one function collects and another takes the norm of.

A chunk gets its gradient from the reduction. Where autograd itself brings it one, a program has
computed a loss with the chunk; that is warned of (:func:`watch_for_losses`).

In the same way it hears of each optimizer that is built with it; see optimizers.py.
"""

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

_TOTAL_NORM = {"get_total_norm", "_get_total_norm"}
_REFUSED = {"clip_grad_norm_", *_TOTAL_NORM}
_NORMS = {"norm", "vector_norm", "matrix_norm", "_foreach_norm"}


class FlatParameter(nn.Parameter):
    """The parameter the optimizer sees. A type of its own, so that outer units leave it alone."""

    is_chunk = False  # other ranks have the rest of it
    was_warned = False  # of a loss that is computed with it
    unit: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to it
    on_optimizer: Callable[[Optimizer, FrameType], None] = staticmethod(lambda *_: None)

    @property
    def grad(self) -> Tensor | None:
        """As of any parameter; but not for a function that would take it for the whole gradient.

        Raises:
            RuntimeError: asked by one of those for one chunk of several.
        """
        grad: Tensor | None = _GRAD.__get__(self)
        return _for_reader(grad, sys._getframe(1)) if self.is_chunk else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """True. torch's ``fully_shard`` asks for this before it changes anything.

        Raises:
            TypeError: asked by that: it would shard a chunk once more.
        """
        if sys._getframe(1).f_globals.get("__name__", "").endswith("._fsdp_param"):
            label = getattr(self.unit(), "label", "?")
            raise TypeError(
                f"torch's FSDP cannot wrap this: unit {label} is a minifsdp."
                f"FullyShardedDataParallel, which is sharded already. Leave torch's FSDP out; wrap "
                f"what is around the sharded part in FullyShardedDataParallel, too."
            )
        return super().is_contiguous(*args, **kwargs)

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer that is being built asks each of its parameters for this."""
        frame = sys._getframe(1)
        if frame.f_code.co_name == "add_param_group" and frame.f_globals is _OPTIMIZER:
            type(self).on_optimizer(frame.f_locals["self"], frame)
        leaf: bool = _IS_LEAF.__get__(self)
        return leaf


def flat_parameter(
    data: Tensor,
    requires_grad: bool,
    unit: object,
    is_chunk: bool,
    grad_dtype: torch.dtype | None,
) -> FlatParameter:
    """A flat parameter of ``data``, ``[n]``; its gradient has the same dtype, or ``grad_dtype``.

    Args:
        unit: that it belongs to. It knows it, and does not keep it alive.
        is_chunk: other ranks have the rest of it.
    """
    param = FlatParameter(data, requires_grad=requires_grad)
    param.unit, param.is_chunk = ref(unit), is_chunk
    if grad_dtype is not None:
        param.grad_dtype = grad_dtype
    return param


def watch_for_losses(param: FlatParameter) -> object:
    """Warn when a loss is computed with ``param`` itself, outside of the model: a penalty on
    ``model.parameters()``.

    Returns:
        What the caller has to keep for as long as it should be watched. (``param`` cannot: it would
        keep itself alive.)
    """
    if not (param.is_chunk and param.requires_grad):
        return None
    with torch.enable_grad():
        view = param.view_as(param)
    assert view.grad_fn is not None
    accumulator = view.grad_fn.next_functions[0][0]  # where autograd would add up its gradients
    assert accumulator is not None
    chunk = ref(param)

    def warn(grads: object) -> None:
        param = chunk()
        if param is None or param.was_warned:
            return
        param.was_warned = True
        warnings.warn(
            f"a loss was computed with the flat parameter of unit "
            f"{getattr(param.unit(), 'label', '?')} itself, of which each rank has a chunk: a "
            f"penalty on model.parameters(), say. The loss counts this rank's chunk only. The "
            f"gradients are right for a sum over elements, and wrong for a norm or a mean. Compute "
            f"it from the module's own parameters, in the forward of the model.",
            stacklevel=2,
        )

    accumulator.register_prehook(warn)
    return accumulator


def _for_reader(grad: Tensor | None, frame: FrameType) -> Tensor | None:
    """The gradient of a chunk, for the code in ``frame`` that reads it."""
    reader = _function(frame)
    function, module = reader.f_code.co_name, reader.f_globals.get("__name__", "")
    if module == "torch.nn.utils.clip_grad" and function in _REFUSED:
        raise _no_norm(function)
    if function == "_unscale_grads_" and _is_alone(reader):
        raise RuntimeError(
            f"{type(reader.f_locals['self']).__name__} was used on the parameters of a sharded "
            f"model. It looks for inf and NaN in this rank's chunks only, so one rank would skip a "
            f"step that others make, and their scales part. Use minifsdp.ShardedGradScaler, with "
            f"the same arguments by name."
        )
    if grad is None or module.startswith(("torch.", "minifsdp.")):
        return grad  # the optimizers, say: several times in each step, so this has to be quick
    names = (*frame.f_code.co_names, *reader.f_code.co_names)
    if not _TOTAL_NORM.isdisjoint(names):
        return grad.as_subclass(_ChunkOfGradient)
    if not _NORMS.isdisjoint(names):
        warnings.warn(
            f"{function}() reads the gradient of a flat parameter, and takes a norm: each rank has "
            f"chunks of the gradients, and would find another norm. model.clip_grad_norm_(max_norm)"
            f" returns that of all gradients (max_norm=math.inf changes none). If you add up "
            f"squares over all ranks, all is well.",
            stacklevel=3,
        )
    return grad


class _ChunkOfGradient(Tensor):
    """What a function that mentions ``get_total_norm`` gets: a gradient, but not for that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _function(sys._getframe(1)).f_code.co_name in _TOTAL_NORM:
            raise _no_norm("get_total_norm")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _function(frame: FrameType) -> FrameType:
    """Of the function that runs here: comprehensions have frames of their own before Python 3.12,
    and a generator's is called by whoever uses it."""
    inside = frame.f_code.co_name in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
    return frame.f_back if inside and frame.f_back is not None else frame


def _no_norm(function: str) -> RuntimeError:
    return RuntimeError(
        f"torch.nn.utils.{function.lstrip('_')} was called on the parameters of a sharded model. "
        f"It would see this rank's chunks only, and find another norm on each rank. Call the "
        f"model's own method: model.clip_grad_norm_(max_norm), which also returns the norm "
        f"(max_norm=math.inf clips nothing)."
    )


def _is_alone(reader: FrameType) -> bool:
    """Whether a gradient scaler looks for inf on this rank, and will not ask the others."""
    scaler = type(reader.f_locals.get("self"))
    if not issubclass(scaler, GradScaler) or getattr(scaler, "asks_all_ranks", False):
        return False
    if scaler.unscale_ is GradScaler.unscale_:
        return scaler._unscale_grads_ is GradScaler._unscale_grads_
    # Torch's sharded one asks in its unscale_(), and does not if an optimizer that is fused, and
    # skips by itself, is stepped without that. (pytorch 2.13)
    return reader.f_back is not None and reader.f_back.f_code.co_name == "_check_inf_per_device"


_GRAD: Any = Tensor.grad  # the properties that those of FlatParameter stand before
_IS_LEAF: Any = Tensor.is_leaf
_OPTIMIZER = vars(sys.modules[Optimizer.__module__])

"""The parameter that the optimizer sees: this rank's shard of a unit, as an ``nn.Parameter``.

Much of what a training script does with parameters is right for shards: an element-wise optimizer,
a sum of gradients, ``clip_grad_value_``. Some of it takes a shard for a whole parameter and is
silently wrong: a norm, a search for inf and NaN. A parameter is not told what is done with it. But
it is asked for its gradient, and the function that asks is on the stack::

    torch.nn.utils.clip_grad_norm_, get_total_norm     refused: model.clip_grad_norm_ is right
    torch.amp.GradScaler                               refused: see grad_scaler.py
    a user's function that takes a norm                warned of, once for each place

The last one may add up over ranks by itself, and be right. A function that asks for the number of
dimensions, which is one, is warned, too: ``if p.dim() > 1`` in an initialization or for parameter
groups would choose none. Two things cannot be seen: a norm that is written as squares and sums, and
a norm of gradients that a different function has collected.

A loss that is computed with a shard is warned of in checks/params_in_graphs.py.

A flat parameter also sees each optimizer that is built with it; see chunks/optimizers.py. For the
optimizer itself it is a parameter like any other: torch chooses the same kernels for it.
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
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, _foreach_supported_types

from minifsdp.dispatch_modes import never_compile_inside

_TOTAL_NORM = {"get_total_norm", "_get_total_norm"}
_OUR_CODE = ("torch.", "minifsdp.")  # which knows what it asks
_REFUSED = {"clip_grad_norm_", *_TOTAL_NORM}
_INSIDE = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "__torch_function__"}
_NORMS = {"norm", "vector_norm", "matrix_norm", "_foreach_norm"}


class FlatParameter(nn.Parameter):
    """A unit's sharded flat parameter, ``[n]``. By its type an outer unit knows that it belongs to
    an inner one.

    Attributes:
        is_sharded: other ranks have other shards of it. False with NO_SHARD.
        unit: returns the unit, or None when that is gone.
        on_optimizer: of the class; called with each optimizer that is built with such parameters.
    """

    is_sharded = False
    unit: Callable[[], Any] = staticmethod(lambda: None)
    on_optimizer: Callable[[Optimizer, FrameType], None] = staticmethod(lambda *_: None)

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as of any parameter; but not for a function that would take the gradient of
        a shard for a whole one.

        Raises:
            RuntimeError: such a function asks, and the parameter is sharded.
        """
        grad: Tensor | None = _GRAD.__get__(self)
        if grad is None or not self.is_sharded:
            return grad
        return _for_reader(grad, sys._getframe(1))

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def _fqns(self) -> list[str]:
        """The names of what is in it; accelerate prints them."""
        return [info.name for info in self.unit().param_infos]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """True. torch's ``fully_shard`` asks this before it changes anything.

        Raises:
            TypeError: ``fully_shard`` asks: it would shard a shard once more.
        """
        if sys._getframe(1).f_globals.get("__name__", "").endswith("._fsdp_param"):
            label = getattr(self.unit(), "label", "?")
            raise TypeError(
                f"torch's FSDP cannot wrap this: unit {label} is a minifsdp."
                f"FullyShardedDataParallel, which is sharded already. Leave torch's FSDP out; wrap "
                f"what is around the sharded part in FullyShardedDataParallel, too."
            )
        return super().is_contiguous(*args, **kwargs)

    def dim(self) -> int:
        """1. Warns code that would get a different answer from the unit's own parameters."""
        return _dimensions(self, sys._getframe(1))

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """As :meth:`dim`."""
        return _dimensions(self, sys._getframe(1))

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True. An optimizer that is being built asks this of each of its parameters."""
        frame = sys._getframe(1)
        if frame.f_code.co_name == "add_param_group" and frame.f_globals is _OPTIMIZER:
            type(self).on_optimizer(frame.f_locals["self"], frame)
        leaf: bool = _IS_LEAF.__get__(self)
        return leaf


# If torch.compile(optimizer.step) compiled the property, it would call itself.
never_compile_inside(vars(FlatParameter)["grad"].fget)

# On GPUs an optimizer takes kernels for many tensors at a time (foreach), if the exact type of each
# parameter is in this list. Without this line it would launch a dozen small kernels for each unit.
# torch's own DTensor gets into the list in the same way.
_foreach_supported_types.append(FlatParameter)


def flat_parameter(
    data: Tensor,
    requires_grad: bool,
    unit: object,
    is_sharded: bool,
    grad_dtype: torch.dtype | None,
) -> FlatParameter:
    """Make the flat parameter of a unit.

    Args:
        data: ``[n]``, this rank's shard without padding.
        unit: referred to weakly, or an optimizer would keep the whole unit alive.
        is_sharded: other ranks have other shards of it.
        grad_dtype: of its gradient; None: the dtype of ``data``.
    """
    param = FlatParameter(data, requires_grad=requires_grad)
    param.unit, param.is_sharded = ref(unit), is_sharded
    if grad_dtype is not None:  # without this torch refuses a gradient of another dtype
        param.grad_dtype = grad_dtype
    return param


def _for_reader(grad: Tensor, frame: FrameType) -> Tensor:
    """The gradient of a shard, for the code in ``frame`` that reads it."""
    reader = _function_frame(frame)
    function, module = reader.f_code.co_name, reader.f_globals.get("__name__", "")
    if module == "torch.nn.utils.clip_grad":
        if function in _REFUSED:
            raise _no_norm(function)
        increment_version(grad)  # foreach kernels do not, and no_sync.py would see no change
    if function == "_unscale_grads_" and _is_local(reader):
        raise RuntimeError(
            f"{type(reader.f_locals['self']).__name__} was used on the parameters of a sharded "
            f"model. It looks for inf and NaN in this rank's shards only, so one rank would skip a "
            f"step that others make, and their scales part. Use minifsdp.ShardedGradScaler, with "
            f"the same arguments by name."
        )
    if module.startswith(_OUR_CODE):
        return grad  # optimizers come here several times in each step, so this has to be quick
    names = (*frame.f_code.co_names, *reader.f_code.co_names)
    if not _TOTAL_NORM.isdisjoint(names):
        return grad.as_subclass(_ShardOfGradient)
    if not _NORMS.isdisjoint(names):
        warnings.warn(
            f"{function}() reads the gradient of a flat parameter, and takes a norm: each rank has "
            f"shards of the gradients, and would find another norm. model.clip_grad_norm_(max_norm)"
            f" returns that of all gradients (max_norm=math.inf changes none). If you add up "
            f"squares over all ranks, all is well.",
            stacklevel=3,
        )
    return grad


def _dimensions(param: FlatParameter, frame: FrameType) -> int:
    """The number of dimensions of a flat parameter, for the code in ``frame`` that asks for it."""
    infos = getattr(param.unit(), "param_infos", ())
    meant = next((info for info in infos if len(info.shape) != 1), None)
    reader = _function_frame(frame)
    if meant is not None and not reader.f_globals.get("__name__", "").startswith(_OUR_CODE):
        warnings.warn(
            f"{reader.f_code.co_name}() asks a flat parameter for its number of dimensions, which "
            f"is 1: it is all parameters of a unit laid end to end, among them {meant.name!r} with "
            f"{len(meant.shape)}. Who chooses by dimensions (which parameters to initialize, or to "
            f"give weight decay) chooses others than in a plain model. With use_orig_params=True "
            f"each parameter keeps its shape. Initialize before you wrap the model.",
            stacklevel=3,
        )
    return 1


class _ShardOfGradient(Tensor):
    """The gradient for a function whose code names ``get_total_norm``. All other uses are fine: the
    function need not pass it on to ``get_total_norm``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _function_frame(sys._getframe(1)).f_code.co_name in _TOTAL_NORM:
            raise _no_norm("get_total_norm")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _function_frame(frame: FrameType) -> FrameType:
    """The frame of the function that ``frame`` is in: a generator has a frame of its own, and so
    has a comprehension before Python 3.12. So has a mode between a function of torch and its
    caller, as the one of ``torch.set_default_device`` is."""
    while frame.f_code.co_name in _INSIDE and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _no_norm(function: str) -> RuntimeError:
    return RuntimeError(
        f"torch.nn.utils.{function.lstrip('_')} was called on the parameters of a sharded model. "
        f"It would see this rank's shards only, and find another norm on each rank. Call the "
        f"model's own method: model.clip_grad_norm_(max_norm), which also returns the norm "
        f"(max_norm=math.inf clips nothing)."
    )


def _is_local(reader: FrameType) -> bool:
    """Whether a gradient scaler looks for inf on this rank only, and does not ask the others."""
    scaler = type(reader.f_locals.get("self"))
    if not issubclass(scaler, GradScaler):
        return False
    if scaler.unscale_ is GradScaler.unscale_:  # it may ask in the method inside, as ours does
        return scaler._unscale_grads_ is GradScaler._unscale_grads_
    # torch's ShardedGradScaler asks the others in its unscale_(). A fused optimizer skips steps by
    # itself, and may step without a call of unscale_(). (pytorch 2.13)
    return reader.f_back is not None and reader.f_back.f_code.co_name == "_check_inf_per_device"


_GRAD: Any = Tensor.grad  # the descriptors that the properties of FlatParameter hide
_IS_LEAF: Any = Tensor.is_leaf
_OPTIMIZER = vars(sys.modules[Optimizer.__module__])

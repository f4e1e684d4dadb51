"""Calls that are right, but not here or not now.

A method that concerns all units is called on the root, between steps (:func:`check_root_and_idle`).
While parameters are out between steps (between_steps/full_params.py) nobody trains with them
(:class:`Summoned`). One thread at a time runs a model (:class:`OneThread`): its units are gathered
and freed in one order, and each of two threads would free what the other one computes with. And
some operations of torch do not go with sharding: :class:`RefusedOperations` names the reason, which
torch's own errors do not.
"""

import sys
import threading
from collections.abc import Iterable, Sequence
from traceback import walk_tb

import torch
from torch._C._functorch import TransformType
from torch.distributed.tensor import DTensor

from minifsdp.core.layers import Call, Layer, Moments
from minifsdp.featured_hooks import FeaturedHooks
from minifsdp.featured_unit import FeaturedUnit


def check_root_and_idle(unit: FeaturedUnit, root: FeaturedUnit, idle: bool, method: str) -> None:
    """Refuse a method that concerns all units, unless it is called on the root and between steps.

    Args:
        idle: whether no forward and no backward is running.

    Raises:
        RuntimeError: ``unit`` is not the root's; or a forward or backward is running.
    """
    if unit is not root:
        raise RuntimeError(
            f"{method} was called on unit {unit.label}, which is inside of another. Call it on the "
            f"outermost FullyShardedDataParallel: it concerns all units together."
        )
    if not idle:
        raise RuntimeError(f"{method} was called in a forward or backward; call it between.")


class Summoned(Layer):
    """Refuses a forward with gradients, and a backward, while parameters are out."""

    def __init__(self, hooks: FeaturedHooks) -> None:
        self._units, self._summoned = hooks.engine.units, hooks.summoned

    def enter(self, unit: FeaturedUnit) -> None:
        """Raises RuntimeError: see :func:`check_summoned`."""
        if self._summoned:
            check_summoned(unit, self._units, any(self._summoned.values()))

    def enter_backward(self) -> None:
        """Raises RuntimeError: see :func:`check_backward_outside`."""
        for one in [*self._summoned]:
            one.end_by_hand()  # it is gathered once more, when its turn comes
        check_backward_outside(self._summoned)


def check_summoned(unit: FeaturedUnit, units: Sequence[FeaturedUnit], as_dtensors: bool) -> None:
    """Refuse to train inside of summon_full_params, and to compute inside of as_dtensors.

    Args:
        unit: the one that was called.
        units: all of its root.
        as_dtensors: whether DTensors are in the place of parameters.

    Raises:
        RuntimeError: DTensors are there; or some units are trained, and gradients are on.
    """
    if as_dtensors:
        raise RuntimeError(
            f"unit {unit.label} was called inside as_dtensors, which shows parameters in the form "
            f"of checkpoints. Leave the block first."
        )
    trained = any(one.sharded_flat_param.requires_grad for one in units)
    if trained and torch.is_grad_enabled():
        raise RuntimeError(
            f"unit {unit.label} was called inside summon_full_params with gradients enabled. They "
            f"would reach parameters that are there for the time of the block only. Leave the "
            f"block first, since forward gathers by itself; or use torch.no_grad()."
        )


def check_backward_outside(summoned: Iterable[FeaturedUnit]) -> None:
    """Raises RuntimeError: a backward begins where the parameters of units are out."""
    if labels := ", ".join(unit.label for unit in summoned):
        raise RuntimeError(
            f"backward() was called inside summon_full_params or as_dtensors, which have taken out "
            f"the parameters of {labels}. A backward gathers them itself, and frees them. Leave "
            f"the block first."
        )


class OneThread(Layer):
    """Refuses a forward while another thread runs a forward or a backward."""

    def __init__(self, hooks: FeaturedHooks) -> None:
        self._hooks = hooks
        self._threads: dict[str, int] = {}  # the one that runs the outermost forward

    def enter(self, unit: FeaturedUnit) -> None:
        """Raises RuntimeError: another thread runs the model."""
        if torch._C._current_graph_task_id() >= 0:
            return  # in a backward, which may run parts of a forward, perhaps in autograd's thread
        thread, hooks = threading.get_ident(), self._hooks
        beside = not hooks.depth and hooks.backward.running_anywhere
        # In one operation, so that of two threads that come at the same time one is refused.
        if beside or self._threads.setdefault("forward", thread) != thread:
            raise RuntimeError(
                f"this model (root: {type(hooks.engine.root.module).__name__}) runs in another "
                f"thread at the same time. Its units are gathered and freed in one order, for one "
                f"forward or backward at a time. Let the threads take turns, with a "
                f"threading.Lock() around forward and backward, or give each thread a model and a "
                f"process group of its own."
            )

    def idle(self, graph: bool) -> None:
        """Another thread may have its turn, unless this is the end of a backward in a forward."""
        if not self._hooks.backward.running:
            self._threads.clear()


class RefusedOperations(Layer):
    """Refuses operations that do not go with sharding, and names the unit and the way out.

    Args:
        hooks: of the root.
    """

    def __init__(self, hooks: FeaturedHooks) -> None:
        self._units, self._summoned = hooks.engine.units, hooks.summoned

    def enter(self, unit: FeaturedUnit) -> None:
        """Raises RuntimeError: see :func:`refuse_functional_gradients`, :func:`refuse_export`."""
        if _transforms():
            refuse_functional_gradients(unit)
        if (_tracer() is not None or torch.compiler.is_exporting()) and not self._summoned:
            refuse_export(unit)

    def enter_backward(self) -> None:
        """Raises RuntimeError: see :func:`refuse_compiled_autograd`."""
        refuse_compiled_autograd()

    def error(self, call: Call, error: RuntimeError) -> None:
        """Raises RuntimeError: ``error`` is one of those that are known here."""
        refuse_transforms(call.unit, error)
        frames = (frame for frame, _ in walk_tb(error.__traceback__))
        if sum(frame.f_code is Moments.run.__code__ for frame in frames) == 1:
            refuse_mixed(call.unit, self._units, error)  # it does not come from a unit inside


_tracer = torch._C._get_tracing_state
"""Returns what torch.jit.trace records with; None outside of it."""
_transforms = torch._C._functorch.get_interpreter_stack
"""Returns the transforms of torch.func around the caller, outermost first; None outside of them."""
_OF_GRADIENTS = (TransformType.Grad, TransformType.Jvp)


def refuse_functional_gradients(unit: FeaturedUnit) -> None:
    """Refuse a forward inside of a transform that takes gradients: its tensors have no memory, so
    the memory of a unit cannot be gathered and freed.

    Raises:
        RuntimeError: one of the transforms around this call takes gradients. (vmap does not.)
    """
    if any(transform.key() in _OF_GRADIENTS for transform in _transforms()):
        raise RuntimeError(
            f"unit {unit.label} was called inside of torch.func.grad, vjp, jvp, jacrev or the "
            f"like, whose tensors have no memory that could be freed. Use torch.autograd.grad, "
            f"torch.autograd.functional (jacobian, hvp) or torch.autograd.forward_ad. (Inside of "
            f"torch.func.vmap a model may be called.)"
        )


def refuse_export(unit: FeaturedUnit) -> None:
    """Refuse a forward that is recorded to be run later. The record would have this forward's
    parameters in it, whose memory is freed afterwards: reading them would end the process.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"unit {unit.label} was called inside of torch.jit.trace, torch.onnx.export or "
        f"torch.export, which would record parameters that are there for this forward only. "
        f"Record a plain model, after plain.load_state_dict(model.state_dict()); or do it inside "
        f"of FSDP.summon_full_params(model, writeback=False), without gradients."
    )


def refuse_compiled_autograd() -> None:
    """Refuse a backward that torch has compiled: it never runs the callbacks for its end, so no
    gradient would reach a parameter, silently.

    Raises:
        RuntimeError: torch has compiled this backward.
    """
    # Looked up, not imported: a program that compiles nothing need not wait for all of Dynamo.
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is not None and compiler.in_compiled_autograd_region:
        raise RuntimeError(
            "backward() was called with compiled autograd, which does not call what gathers and "
            "reduces at the end of a backward. Switch it off (torch._dynamo.config."
            "compiled_autograd, torch._dynamo.compiled_autograd): torch.compile of a model, a "
            "block or a loss compiles their backwards without it."
        )


def refuse_transforms(unit: FeaturedUnit, error: RuntimeError) -> None:
    """Name the unit and the way out where torch refuses a transform of torch.func: while
    saved-tensor hooks are set, torch allows none that goes backwards (grad, vjp, jacrev).

    Args:
        error: raised in the unit's forward.

    Raises:
        RuntimeError: ``error`` is that refusal.
    """
    if "saved tensor hooks" in str(error):
        raise RuntimeError(
            f"torch.func.grad, vjp, jacrev or the like was called in the forward of unit "
            f"{unit.label}. torch does not allow that where saved-tensor hooks are set, which is "
            f"so in a sharded model and in an activation checkpoint. Use torch.autograd.grad "
            f"there, which works."
        ) from error


def refuse_mixed(unit: FeaturedUnit, units: Sequence[FeaturedUnit], error: RuntimeError) -> None:
    """Name the units where torch refuses an operation that got a DTensor: between a step and the
    next forward of its unit, a parameter in rows is one.

    Args:
        unit: in whose forward ``error`` was raised. If its own parameters are DTensors even there
            (support/tensor_parallel.py), what torch says is all that is known.
        units: all of its root.

    Raises:
        RuntimeError: ``error`` is that refusal.
    """
    if "got mixed torch.Tensor and DTensor" not in str(error) or DTensor in map(type, unit.views):
        return
    inside = [u.label for u in units if unit in u.ancestors and not u.shows_views]
    about_inside = ""
    if inside:
        about_inside = (
            f"The parameters of the units inside of it ({', '.join(inside)}) are there while the "
            f"module of that unit is called. If the module around one computes with them itself, "
            f"as nn.MultiheadAttention does with its out_proj, let both be one unit. "
        )
    raise RuntimeError(
        f"an operation in the forward of unit {unit.label} got a parameter that is sharded now, or "
        f"what was made of one (torch says: {str(error).split(',')[0]}). {about_inside}An input "
        f"that was made of a parameter between steps, as by weight.new_zeros(), is a DTensor: make "
        f"it by torch.zeros(..., dtype=weight.dtype, device=weight.device)."
    ) from error

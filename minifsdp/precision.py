"""Mixed precision: low precision to compute and communicate, full precision to store.

Half of the bits are half of the bytes on the network and, on a GPU, several times the speed. But an
update is often a thousandth of the parameter, which 8 bits of mantissa cannot represent. So each
rank stores its shard in full precision, and a *copy* of it in low precision is all-gathered::

    shard fp32 --cast--> bf16 --all-gather--> unsharded flat parameter bf16    forward, backward
    shard.grad fp32 <--cast-- fp32 <--reduce-scatter-- fp32 <--cast-- gradient bf16

With sharding this costs little memory: each rank stores one shard in full precision, and not a
second model. This file casts the parameters and the gradients, and the inputs and outputs of
modules; support/buffers.py casts the buffers.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifsdp.api import MixedPrecision
from minifsdp.comm.pieces import Pieces
from minifsdp.core.collectives import Group
from minifsdp.core.engine import Engine
from minifsdp.core.layers import Call, Layer
from minifsdp.core.outputs import tensors_in
from minifsdp.core.streams import Finish, Streams
from minifsdp.core.unit_state import BACKWARD, Purpose
from minifsdp.core.unshard import OwnShard, wait_for_unshard
from minifsdp.core.views import show_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.pytree import map_tensors

FULL_PRECISION = MixedPrecision(cast_forward_inputs=True)
"""For a unit that computes in full precision inside a model that does not."""


class Precision(Layer):
    """Computes in the dtypes of the precision, and passes inputs on in these.

    Attributes:
        purpose: of the last forward. Before the first one it is ``LOOK``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.purpose = engine, Purpose.LOOK

    def start(self, purpose: Purpose) -> None:
        """Have parameters and buffers in the dtypes for this purpose."""
        if purpose is not Purpose.LOOK:
            self._change(purpose)
        for unit in self._engine.units:
            unit.choose_precision(purpose)

    def restore(self) -> None:
        """Have them in the dtypes of the last forward again, after a look at parameters."""
        for unit in self._engine.units:
            unit.choose_precision(self.purpose)

    def start_backward(self, call: Call | None) -> None:
        """An evaluation may have come between, perhaps in full precision."""
        if call is not None and call.notes["purpose"] is not self.purpose:
            self._change(call.notes["purpose"])
            self.restore()  # also for what a checkpoint will run again

    def _change(self, purpose: Purpose) -> None:
        if purpose is not self.purpose:
            self.purpose = purpose
            for unit in self._engine.units:
                self._engine.parameters.reshard(unit)

    def before_backward(self, call: Call) -> None:
        """The graph was made with the unsharded parameters of its forward."""
        if call.unit.unsharded is not call.unsharded:
            self._engine.parameters.reshard(call.unit)
            call.unit.compute_with(call.unsharded)

    def inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast and move them; see :func:`prepare_inputs`."""
        unit, engine = call.unit, self._engine
        call.notes["purpose"] = self.purpose
        # Also where a checkpoint around the root runs it again, which is then not the outermost.
        is_root = unit is engine.root or call.outermost
        return prepare_inputs(unit, is_root, args, kwargs)


class PrecisionByMode(Precision):
    """As :class:`Precision`, where a unit has ``full_precision_in_eval``: one backward may go
    through forwards in train() and in eval() mode."""

    def again(self, call: Call) -> None:
        """The unit is gathered, perhaps in the dtype of another forward."""
        unit = call.unit
        if unit.unsharded is not call.unsharded:
            self.before_backward(call)
            self._engine.parameters.unshard(unit, BACKWARD)
            wait_for_unshard(unit)
            show_views(unit)


class CastBack(Layer):
    """Passes outputs on in the dtype of the inputs, if a unit casts its inputs."""

    def inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Note how to cast the output, before :class:`Precision` casts the inputs."""
        call.notes["cast output"] = output_cast(call.unit, args, kwargs)
        return args, kwargs

    def after_forward(self, call: Call, output: Any) -> Any:
        """Cast the output; see :func:`output_cast`."""
        cast = call.notes["cast output"]
        return output if cast is None else cast(output)


class Cast:
    """The stage of a reduction that casts the gradient to the dtype of the reduction.

    Args:
        dtype: ``reduce_dtype``.
    """

    stream, travels, on_host = "reduce", False, False

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def launch(self, unit: FeaturedUnit, value: Tensor | Pieces) -> tuple[Tensor | Pieces, Finish]:
        """``value``: of any shape and dtype. Returns it in the dtype of the reduction, not copied
        if it has that already, and a ``finish`` that has nothing to do."""
        return value.to(self._dtype), lambda: None


class CastShard:
    """A source of a unit (unshard.py): what another source sends, in the dtype that the unit is
    computed in now. With ``full_precision_in_eval`` this depends on the mode, and nothing may have
    to be cast.

    Args:
        inner: what is cast, where it is: the unit's shard, or a copy of it on the device.
    """

    def __init__(self, inner: OwnShard) -> None:
        self.inner = inner
        self.group: Group | None = inner.group

    def prepare(self, unit: FeaturedUnit, streams: Streams) -> None:
        """As ``inner`` does."""
        self.inner.prepare(unit, streams)

    def tensor(self, unit: FeaturedUnit, streams: Streams) -> Tensor:
        """A copy of what ``inner`` sends, of the same shape; or itself, if it has the dtype. If
        parameters differ in dtype, the shape may be different (mixed_rows.py)."""
        # Cast before it is sent. Else twice as many bytes would be sent, and the all-gather would
        # write numbers of one dtype into memory of another one.
        shard = self.inner.tensor(unit, streams)
        if unit.mixed is not None:
            return unit.mixed.cast(shard, unit.unsharded.layout, unit.shard_rank)
        return shard.to(unit.unsharded.dtype)


def prepare_inputs(
    unit: FeaturedUnit, is_root: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the inputs of a unit's module to the dtype that the unit computes in, if its precision
    says so, and move those of the root to the unit's device.

    Args:
        is_root: this is the outermost module, which the user calls. ``cast_root_forward_inputs`` is
            about it, and only if there is a ``param_dtype``.
        args, kwargs: any pytree, of which the floating-point tensors are cast. Tensors of integers
            keep their dtype. A tensor that has the dtype and the device already is not copied.

    Returns:
        ``args`` and ``kwargs`` for the module. The cast is part of the graph, so the gradient of an
        input has the input's dtype.
    """
    precision = unit.precision
    casts = precision.cast_forward_inputs or (
        is_root and precision.cast_root_forward_inputs and precision.param_dtype is not None
    )
    if not casts and not is_root:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        # Without this check indices would be rounded, and so would the inputs of integer units.
        both = tensor.is_floating_point() and unit.unsharded.dtype.is_floating_point
        dtype = unit.unsharded.dtype if casts and both else tensor.dtype
        return tensor.to(unit.device if is_root else tensor.device, dtype)

    return map_tensors(prepare, args), map_tensors(prepare, kwargs)


def output_cast(unit: FeaturedUnit, args: object, kwargs: object) -> Callable[[Any], Any] | None:
    """For a unit of full precision in a model of low precision: the function that casts its outputs
    to the dtype of its inputs.

    Args:
        args, kwargs: the inputs of the unit's module, before :func:`prepare_inputs`.

    Returns:
        A function of the output, any pytree, that casts the tensors which have the dtype that the
        unit computes in, and no others. None: no output has to be cast, because no floating-point
        input has another dtype, or because the inputs have several others.
    """
    precision = unit.precision
    if not precision.cast_forward_inputs or precision.param_dtype is not None:
        return None
    dtypes = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()} - {
        unit.unsharded.dtype
    }
    if len(dtypes) != 1:
        return None  # no input has another dtype, or there are several and none is the right one
    (dtype,) = dtypes

    def restore(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype is unit.unsharded.dtype else tensor

    return lambda output: map_tensors(restore, output)

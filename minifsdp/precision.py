"""Mixed precision: small numbers to compute and send with, exact ones to keep.

Half the bits are half the bytes on the network and, on a GPU, a multiple of the speed. But an
update is often a thousandth of the parameter it changes, which 8 bits of mantissa cannot hold. So
each rank keeps its shard exact, and a *copy* of it is gathered::

    shard fp32 --cast--> bf16 --all-gather--> full bf16      forward, backward
    shard.grad fp32 <--cast-- fp32 <--reduce-scatter-- fp32 <--cast-- gradient bf16

With sharding this is nearly free: what is kept exact is a chunk on each rank, not a second model.
The casts of parameters are in unshard.py, those of gradients in reduce.py and those of buffers in
buffers.py. This file has what goes into a module and what comes out.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from minifsdp.api import MixedPrecision
from minifsdp.support.pytree import map_tensors, tensors_in
from minifsdp.unit import Unit

FULL_PRECISION = MixedPrecision(cast_forward_inputs=True)
"""A unit that computes in full precision among others that do not."""


def prepare_inputs(
    unit: Unit, is_root: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a unit's module, in the dtype and on the device that it computes with.

    Args:
        is_root: this is the outermost module, called by the user with whatever he has.

    Tensors in tuples, lists, dicts and dataclasses are found. Integers keep their dtype. Nothing is
    copied that is right already. The cast is part of the graph: gradients come back in the dtype
    of what was given.
    """
    precision = unit.precision
    casts = precision.cast_forward_inputs or (
        is_root and precision.cast_root_forward_inputs and precision.param_dtype is not None
    )
    if not casts and not is_root:
        return args, kwargs

    def prepare(tensor: Tensor) -> Tensor:
        both = tensor.is_floating_point() and unit.unsharded.dtype.is_floating_point
        dtype = unit.unsharded.dtype if casts and both else tensor.dtype
        return tensor.to(unit.device if is_root else tensor.device, dtype)

    return map_tensors(prepare, args), map_tensors(prepare, kwargs)


def output_cast(unit: Unit, args: object, kwargs: object) -> Callable[[Any], Any] | None:
    """For a unit in full precision: what puts its outputs in the dtype that its inputs have.

    None, if there is nothing to do.
    """
    precision = unit.precision
    if not precision.cast_forward_inputs or precision.param_dtype is not None:
        return None
    dtypes = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()} - {
        unit.unsharded.dtype
    }
    if len(dtypes) != 1:
        return None  # it was not called with low precision, or with several of them
    (dtype,) = dtypes

    def restore(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype is unit.unsharded.dtype else tensor

    return lambda output: map_tensors(restore, output)

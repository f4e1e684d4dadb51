"""Always returns a function, which does nothing where nothing has to be cast."""

from collections.abc import Callable
from typing import Any

import torch

from minifsdp.core.outputs import tensors_in
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.pytree import map_tensors


def output_cast(unit: FeaturedUnit, args: object, kwargs: object) -> Callable[[Any], Any] | None:
    own, found = unit.unsharded.dtype, list[torch.dtype]()
    for value in (args, kwargs):
        for tensor in tensors_in(value):
            if tensor.is_floating_point() and tensor.dtype != own and tensor.dtype not in found:
                found.append(tensor.dtype)
    exact = unit.precision.cast_forward_inputs and unit.precision.param_dtype is None
    if not exact or len(found) != 1:
        return lambda output: output
    return lambda output: map_tensors(
        lambda tensor: tensor.to(found[0]) if tensor.dtype == own else tensor, output
    )

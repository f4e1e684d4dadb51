"""Flatten: many tensors <-> one 1-D tensor.

A model has hundreds of parameters of all shapes. One collective for each of them would be slow,
because each message has a fixed cost, whatever its size. Dividing each of them by the number of
ranks would be complicated. So the parameters of a unit are concatenated to one *flat parameter*::

    weight [2, 3]   w w w w w w ─┐
    bias   [2]      b b         ─┴─>  flat [8]   w w w w w w b b

The layers compute with *views* of it: tensors of the original shapes that share its memory. To
autograd a view is an operation like any other, and the gradients of the views are the gradient of
the flat parameter: each unit has one, to be reduced with one collective. (The engine makes its
views in views.py; or in support/piece_views.py, where these gradients stay as they come until they
are sent.)

These are pure functions: nothing here depends on ranks, modules or streams.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_flattenable(tensors: Mapping[str, Tensor]) -> None:
    """Check that tensors can be parts of one flat parameter.

    Args:
        tensors: fully qualified name -> parameter, of any shape, for all parameters of one unit.

    Raises:
        ValueError: they differ in dtype, device or requires_grad, and the message lists them by
            their value; or one of them has its elements in another order than row by row.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"parameter {name!r} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}. A flat parameter has its elements row by row, so layers "
                f"would use different strides, and round differently. Do this before wrapping: "
                f"param.data = param.data.contiguous(). Inputs may be channels_last all the same."
            )
    for attribute in ("dtype", "device", "requires_grad"):
        by_value: dict[object, list[str]] = {}
        for name, tensor in tensors.items():
            by_value.setdefault(getattr(tensor, attribute), []).append(name)
        if len(by_value) > 1:
            found = "; ".join(f"{value}: {', '.join(names)}" for value, names in by_value.items())
            raise ValueError(
                f"the parameters of one unit share one flat tensor, so they must have the same "
                f"{attribute}. Found {found}. Make them alike, or wrap them in units of their own. "
                f"minifsdp's rows (use_orig_params=True) take frozen parameters of any dtype."
            )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, each in row-major order.

    Args:
        tensors: at least one, of any shapes, of one dtype and on one device.

    Returns:
        A new tensor ``[sum of numels]`` of that dtype, on that device, which needs no gradient.
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of ``flat``, one for each shape, in order.

    They come from one split of ``flat``, of which the last piece is the padding, each by way of one
    ``view``. An engine may take the gradients of all pieces there, before autograd joins them.

    Args:
        flat: ``[padded_numel]``, which is at least the sum of the shapes' numels. The elements
            after that are padding. Their gradient is zero, so that the gradient of ``flat`` is
            padded as ``flat`` is.
        shapes: of the views; they may be 0-d, or have no elements.
    """
    numels = [*map(math.prod, shapes)]
    pieces = flat.split_with_sizes([*numels, flat.numel() - sum(numels)])
    return [*map(Tensor.view, pieces, shapes)]  # the padding has no shape, and gets no view

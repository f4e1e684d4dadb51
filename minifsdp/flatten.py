"""Many tensors <-> one 1-D tensor.

A model has hundreds of parameters of all shapes. One collective for each would be slow (a network
has a fixed price for each message, whatever its size), and dividing each by the number of ranks
would be fiddly. So the parameters of a unit are laid end to end in one *flat parameter*::

    weight [2, 3]   w w w w w w ─┐
    bias   [2]      b b         ─┴─>  flat [8]   w w w w w w b b

and the layers compute with *views*: tensors of the old shapes that share the flat tensor's memory.
To autograd a view is an operation like any other. Its gradient flows back into the flat tensor, so
one gradient arrives for the whole unit, already flat, ready to be reduced.

Pure functions: nothing here knows of ranks, modules or streams.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_flattenable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what cannot share one flat tensor.

    Args:
        tensors: fully qualified name -> parameter, of any shape, those of one unit.

    Raises:
        ValueError: they differ in dtype, device or requires_grad. The message says which is which.
    """
    advice = {
        "dtype": "Convert them to one dtype, or wrap those of one dtype in a unit of their own.",
        "device": "Move the module to one device before wrapping it.",
        "requires_grad": "Freeze or train all of them, or wrap the frozen ones in their own unit.",
    }
    for attribute, remedy in advice.items():
        by_value: dict[object, list[str]] = {}
        for name, tensor in tensors.items():
            by_value.setdefault(getattr(tensor, attribute), []).append(name)
        if len(by_value) > 1:
            found = "; ".join(f"{value}: {', '.join(names)}" for value, names in by_value.items())
            raise ValueError(
                f"the parameters of one unit share one flat tensor, so they must have the same "
                f"{attribute}. Found {found}. {remedy}"
            )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Lay ``tensors`` end to end. Returns a new tensor ``[sum of numels]``, without gradient."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of ``flat``, one for each shape, in order.

    Args:
        flat: ``[n]`` with n at least the sum of the shapes' numels. What is left at the end is
            padding; its gradient is zero, so the gradient of ``flat`` comes padded for free.
        shapes: of the views; 0-d and empty ones are ordinary.
    """
    numels = [math.prod(shape) for shape in shapes]
    pieces = torch.split(flat, [*numels, flat.numel() - sum(numels)])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]

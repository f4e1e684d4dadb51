"""Sizes in a loop, what is left of flat as the last one, and reshape() in place of view()."""

from collections.abc import Sequence

import torch
from torch import Tensor


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    sizes, left = [], flat.numel()
    for shape in shapes:
        sizes.append(torch.Size(shape).numel())
        left -= sizes[-1]
    *pieces, _ = torch.split(flat, [*sizes, left])
    return [piece.reshape(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]

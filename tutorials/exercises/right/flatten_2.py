"""With narrow() and an offset, instead of split()."""

from collections.abc import Sequence

import torch
from torch import Tensor


def unflatten(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    views, offset = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        views.append(flat.narrow(0, offset, numel).reshape(shape))
        offset += numel
    return views

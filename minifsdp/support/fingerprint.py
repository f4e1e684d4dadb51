"""A number that stands for the values of tensors, to compare values without sending them.

Ranks compare the parameters that they were given (checks/same_model.py), and after a forward its
parameters are compared with those from before it (checks/param_changes.py). The number is a sum of
all bits, read as integers. Each tensor has the weight of its position, so that two tensors that
have changed places give a different number.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[Tensor]) -> int | None:
    """A number that is the same for the same bits in the same order, on any device; None if a
    tensor is on the meta device, where it has no values.

    Args:
        tensors: of any shapes and dtypes.
    """
    total = 0
    for position, tensor in enumerate(tensors, 1):
        if tensor.is_meta:
            return None
        flat = tensor.detach().reshape(-1).contiguous()
        # A tensor of one element may have any stride, and view() to bytes needs a stride of 1.
        data = flat.as_strided(flat.shape, (1,)).view(torch.uint8)
        end = data.numel() // 8 * 8
        # Eight bytes at a time, which have to begin at a multiple of eight.
        words = data[:end].clone() if data.storage_offset() % 8 else data[:end]
        rest = int.from_bytes(bytes(data[end:].tolist()), "little")
        total += position * (int(words.view(torch.int64).sum()) + rest)
    return total

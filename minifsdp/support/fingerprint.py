"""A number for the values of tensors, to compare them without sending them.

Ranks compare the parameters that they were given (checks/same_model.py), and a forward is asked
whether it has changed its parameters behind autograd's back (param_views.py).
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[Tensor]) -> int | None:
    """A number that is the same for the same bits, on any device; None where there are none."""
    total = 0
    for place, tensor in enumerate(tensors, 1):
        if tensor.is_meta:
            return None
        flat = tensor.detach().reshape(-1).contiguous()
        bits = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a lone element's may differ
        end = bits.numel() // 8 * 8
        words = bits[:end].clone() if bits.storage_offset() % 8 else bits[:end]
        rest = int.from_bytes(bytes(bits[end:].tolist()), "little")
        total += place * (int(words.view(torch.int64).sum()) + rest)
    return total

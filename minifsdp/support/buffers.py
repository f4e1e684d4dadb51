"""Buffers: what a module keeps that is not a parameter.

Running statistics, masks, tables of positions. No gradient reaches them and they are small, so
they are not sharded: every rank has its own. They only have to be where the parameters are computed
with and, given ``MixedPrecision.buffer_dtype``, in that dtype. Integers and booleans stay what they
are: a counter in bfloat16 stops counting at 256.
"""

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of one unit.

    Args:
        modules: the modules of the unit, those of nested units excluded.
        dtype: what floating-point buffers are cast to before use; None leaves them alone.
    """

    def __init__(self, modules: list[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._originals = {
            (module, name): buffer.dtype
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def place(self, device: torch.device, full_precision: bool) -> None:
        """Move and cast those that are elsewhere, or in another dtype.

        Args:
            device: where the unit computes.
            full_precision: back to the dtype that they had at wrapping.
        """
        placed: dict[Tensor, Tensor] = {}  # what two modules share, they share afterwards
        for (module, name), original in self._originals.items():
            buffer = module._buffers.get(name)  # looked up anew: users replace buffers
            if buffer is None:
                continue
            dtype = buffer.dtype
            if self._dtype is not None and original.is_floating_point:
                dtype = original if full_precision else self._dtype
            if buffer.dtype is not dtype or buffer.device != device:
                if buffer not in placed:
                    with torch.inference_mode(False):  # it outlives such a forward
                        placed[buffer] = buffer.to(device, dtype)
                module._buffers[name] = placed[buffer]

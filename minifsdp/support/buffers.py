"""Buffers: tensors that a module keeps and that are not parameters.

Examples are running statistics, masks and tables of positions. They get no gradients and they are
small, so they are not sharded: every rank has all of them. They only have to be on the device that
the unit computes on and, with ``MixedPrecision.buffer_dtype``, in that dtype. Integers and booleans
keep their dtype: a counter in bfloat16 stops counting at 256.
"""

import torch
from torch import Tensor, nn

from minifsdp.support.tensor_attribute import TensorAttribute


class Buffers:
    """The buffers of one unit.

    Args:
        modules: the modules of the unit, without those of nested units.
        dtype: what floating-point buffers are cast to before they are used; None: no cast.

    Attributes:
        original_dtypes: where they are -> their dtypes at wrapping.
    """

    def __init__(self, modules: list[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.original_dtypes = {
            TensorAttribute(module, name): buffer.dtype
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def place(self, device: torch.device, full_precision: bool) -> None:
        """Move the buffers that are on another device, and cast those of another dtype.

        Args:
            device: where the unit computes.
            full_precision: cast to the dtypes that the buffers had at wrapping.
        """
        placed: dict[Tensor, Tensor] = {}  # a buffer that two modules share stays shared
        for attribute, original in self.original_dtypes.items():
            buffer = attribute.get()  # in every call, because users replace and remove buffers
            if buffer is None:
                continue
            dtype = buffer.dtype
            if self._dtype is not None and original.is_floating_point:
                dtype = original if full_precision else self._dtype
            if buffer.dtype is not dtype or buffer.device != device:
                if buffer not in placed:
                    with torch.inference_mode(False):  # it outlives a forward in inference mode
                        placed[buffer] = buffer.to(device, dtype)
                attribute.set(placed[buffer])  # a new one: a graph may have saved the old values

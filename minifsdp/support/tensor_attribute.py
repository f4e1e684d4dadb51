"""Where a module has a tensor: the module, and the name of the attribute.

A parameter can be replaced only where a module has it, and several modules may have the same one
(tied weights)::

    TensorAttribute(model.embed, "weight")  --+
                                              +-- one parameter
    TensorAttribute(model.head, "weight")  ---+

``set`` writes into the module's own dict of parameters or buffers. An assignment
(``model.head.weight = tensor``) would run the module's ``__setattr__`` and torch's registration
hooks, which refuse anything but an ``nn.Parameter``.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn


class TensorAttribute(NamedTuple):
    """A parameter or a buffer of ``module``, by its name there."""

    module: nn.Module
    name: str

    def get(self) -> Any:
        """The tensor that is there now (perhaps a view of a parameter); None without one."""
        return self._tensors().get(self.name)

    def set(self, tensor: Tensor) -> None:
        """Put ``tensor`` there."""
        self._tensors()[self.name] = tensor

    def _tensors(self) -> dict[str, Any]:
        buffers = self.module._buffers
        return buffers if self.name in buffers else self.module._parameters

"""One unit's parameters while they are out, as ordinary parameters under their own names.

What a caller may do to a parameter is more than to change it in place: he may give it another
``data`` or ``grad``, or put another parameter in its place. All of that is found again here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minifsdp.flatten import unflatten
from minifsdp.support.param_views import FLAT_PARAM, use_sharded_views
from minifsdp.unit import Unit


@dataclass
class UnitParams:
    """All chunks of a unit, ``[n * ranks]``, and its gradient, in the same way, if it is wanted."""

    unit: Unit
    flat: Tensor
    grad: Tensor | None
    version: int = 0  # of ``flat``, before the caller has it

    def register(self) -> None:
        """Turn the views into parameters, so that torch finds them under their names."""
        self.version = self.flat._version
        grads = self._grads()
        self.unit.uses_unsharded_views = True
        self.unit.module._parameters.pop(FLAT_PARAM, None)  # no element may be listed twice
        for place, (info, view) in enumerate(
            zip(self.unit.param_infos, self._views(), strict=True)
        ):
            param = nn.Parameter(
                view.detach(), requires_grad=self.unit.sharded_flat_param.requires_grad
            )
            param.grad = None if grads is None else grads[place]
            for module, attribute in info.owners:
                setattr(module, attribute, param)  # which an RNN notices, too

    def unregister(self) -> None:
        """Undo that, whatever the caller has put in the parameters' places."""
        use_sharded_views(self.unit)

    def check_shapes(self) -> None:
        """Refuse what cannot be written back.

        Raises:
            ValueError: a parameter was removed, or replaced by one of another shape.
        """
        for info in self.unit.param_infos:
            for module, attribute in info.owners:
                param = module._parameters.get(attribute)
                if param is None or param.shape != info.shape:
                    raise ValueError(
                        f"parameter {info.name!r} of unit {self.unit.label} was replaced inside "
                        f"summon_full_params by {None if param is None else list(param.shape)}; it "
                        f"has to stay a tensor of shape {list(info.shape)}."
                    )

    def write_back(self) -> bool:
        """Store this rank's chunk of what the parameters, and their gradients, are now.

        Returns:
            Whether the parameters were written to; the same on all ranks that have done the same.
        """
        unit, grads = self.unit, self._grads()
        changed = self.flat._version != self.version
        for place, (info, view) in enumerate(zip(unit.param_infos, self._views(), strict=True)):
            for module, attribute in info.owners:
                param = module._parameters[attribute]
                assert param is not None
                changed |= _keep(param.data, view)
                if grads is not None:
                    none = grads[place].new_zeros(())
                    _keep(none if param.grad is None else param.grad, grads[place])
        own = slice(
            unit.shard_rank * unit.padded_shard.numel(),
            (unit.shard_rank + 1) * unit.padded_shard.numel(),
        )
        # Only what differs: a graph that is waiting for its backward would take a copy of the same
        # values for a change.
        if not torch.equal(self.flat[own], unit.padded_shard):
            unit.padded_shard.copy_(self.flat[own])
        if self.grad is not None and unit.sharded_flat_param.grad is not None:
            unit.sharded_flat_param.grad.copy_(self.grad[own][: unit.sharded_flat_param.numel()])
        return changed

    def _views(self) -> list[Tensor]:
        return unflatten(self.flat, [info.shape for info in self.unit.param_infos])

    def _grads(self) -> list[Tensor] | None:
        shapes = [info.shape for info in self.unit.param_infos]
        return None if self.grad is None else unflatten(self.grad, shapes)


def _keep(value: Tensor, view: Tensor) -> bool:
    replaced = value.data_ptr() != view.data_ptr()  # and not changed in place: `weight.data = ...`
    if replaced:
        view.data.copy_(value)
    return replaced

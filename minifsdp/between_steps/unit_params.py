"""One unit's unsharded parameters, between steps, as ordinary parameters.

::

    flat [padded_numel]   w w w w w w b b      a view of it for each parameter
                          weight      bias     registered in the modules, for as long as they are
                                               summoned (full_params.py)

A caller may change a parameter in place, assign another tensor to its ``data`` or ``grad``, or
assign another parameter to the module's attribute. All of these changes are written back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minifsdp.flatten import unflatten
from minifsdp.support.param_views import FLAT_PARAM, use_sharded_views
from minifsdp.unit import Unit


@dataclass
class SummonedParams:
    """The parameters of one unit, while they are summoned.

    Attributes:
        unit: whose parameters they are.
        flat: the shards of all ranks, ``[padded_numel]``, in the dtype of the shard.
        grad: the same of its gradient; None if that is not wanted, or there is none.
        version: of ``flat``, before the caller may change it.
    """

    unit: Unit
    flat: Tensor
    grad: Tensor | None
    version: int = 0

    def register(self) -> None:
        """Register the parameters in their modules, under their names."""
        self.version = self.flat._version
        grads = self._grads()
        self.unit.uses_unsharded_views = True
        # Without this line parameters() would list each element twice.
        self.unit.module._parameters.pop(FLAT_PARAM, None)
        for index, (info, view) in enumerate(
            zip(self.unit.param_infos, self._views(), strict=True)
        ):
            param = nn.Parameter(
                view.detach(), requires_grad=self.unit.sharded_flat_param.requires_grad
            )
            param.grad = None if grads is None else grads[index]
            for module, attribute in info.owners:
                setattr(
                    module, attribute, param
                )  # not in _parameters: an RNN has a list of its own

    def unregister(self) -> None:
        """Put the placeholders back, also where the caller has assigned something else."""
        use_sharded_views(self.unit)

    def check_shapes(self) -> None:
        """Check that all parameters can be written back.

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
        """Copy this rank's part of the parameters, and of their gradients, to its shard.

        Returns:
            Whether the caller has written to the parameters. Ranks on which callers have done the
            same return the same.
        """
        unit, grads = self.unit, self._grads()
        changed = self.flat._version != self.version
        for index, (info, view) in enumerate(zip(unit.param_infos, self._views(), strict=True)):
            for module, attribute in info.owners:
                param = module._parameters[attribute]
                assert param is not None
                changed |= _copy_if_replaced(param.data, view)
                if grads is not None:
                    zero = grads[index].new_zeros(())
                    _copy_if_replaced(zero if param.grad is None else param.grad, grads[index])
        size = unit.padded_shard.numel()
        own = slice(unit.shard_rank * size, (unit.shard_rank + 1) * size)
        # Without this check the shard's version would change even if its values do not, and a
        # backward that is still to come would be refused.
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


def _copy_if_replaced(value: Tensor, view: Tensor) -> bool:
    """Copy ``value`` to ``view``, unless it is this view. Returns whether it is not."""
    replaced = value.data_ptr() != view.data_ptr()  # by ``weight.data = ...``, for example
    if replaced:
        view.data.copy_(value)
    return replaced

"""One unit's unsharded parameters, between steps, as ordinary parameters.

::

    flat [padded_numel]   w w w w w w b b      a view of it for each parameter
                          weight      bias     registered in the modules, for as long as they are
                                               summoned (full_params.py)

A caller may change a parameter in place, assign another tensor to its ``data`` or ``grad``, or
assign another parameter to the module's attribute. All of these changes are written back.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.comm.blocks import of_rank
from minifsdp.core.views import FLAT_PARAM, hide_views
from minifsdp.featured_unit import FeaturedUnit
from minifsdp.support.dtensors import distributed
from minifsdp.wrapping.orig_params import end_of_full_params


@dataclass
class SummonedParams:
    """The parameters of one unit, while they are summoned.

    Attributes:
        unit: whose parameters they are.
        flat: the shards of all ranks, ``[padded_numel]``, in the dtype of the shard.
        grad: the same for the gradient; None if it is not wanted, or there is none.
        version: of ``flat``, before the caller may change it.
        params: what the modules have got.
    """

    unit: FeaturedUnit
    flat: Tensor
    grad: Tensor | None
    version: int = 0
    params: list[nn.Parameter] = field(default_factory=list)

    def register(self) -> None:
        """Register the parameters in their modules, under their names."""
        self.version = self.flat._version
        self.unit.shows_views = True
        # Without this line parameters() would list each element twice.
        self.unit.module._parameters.pop(FLAT_PARAM, None)
        for info, view, grad, trained in zip(
            self.unit.param_infos, self._views(), self._grads(), self.unit.trained, strict=True
        ):
            value = view.detach()
            if info.spec is not None:
                value = distributed(value, info.spec)
            param = nn.Parameter(value, requires_grad=trained)
            param.grad = grad
            vars(param).update(info.attributes)
            self.params.append(param)
            for module, attribute in info.owners:
                setattr(module, attribute, param)  # not in _parameters: an RNN has its own list

    def unregister(self) -> None:
        """Put the placeholders back, also where the caller has assigned something else."""
        end_of_full_params(self.unit, self.params)
        self.params.clear()  # or the unit's memory would not be freed
        hide_views(self.unit)

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
        unit = self.unit
        changed = self.flat._version != self.version
        for info, view, grad in zip(unit.param_infos, self._views(), self._grads(), strict=True):
            for module, attribute in info.owners:
                param = module._parameters[attribute]
                assert param is not None
                changed |= _copy_if_replaced(param.data, view)
                if grad is not None:
                    zero = grad.new_zeros(())
                    _copy_if_replaced(zero if param.grad is None else param.grad, grad)
        # With offload of either kind flat and shard are on two devices. torch.equal needs one.
        own = unit.layout.shard(self.flat, unit.shard_rank).to(unit.padded_shard.device)
        # Without this check the shard's version would change even if its values do not, and a
        # backward that is still to come would be refused.
        # (As bytes: those of another dtype may read as NaN, unlike itself, or as -0, equal to 0.)
        if not torch.equal(own.view(torch.uint8), unit.padded_shard.view(torch.uint8)):
            unit.padded_shard.copy_(own)
        shard = unit.sharded_flat_param
        if self.grad is not None and shard.grad is not None:
            blocks, ranks = unit.layout.trained_blocks, unit.shard_world_size
            own = of_rank(self.grad, blocks, ranks, unit.shard_rank)
            shard.grad.copy_(own[: shard.numel()])
        return changed

    def _views(self) -> list[Tensor]:
        return self.unit.layout.unflatten(self.flat)

    def _grads(self) -> list[Any]:
        """Views of the gradient, for each parameter; None for those that have none."""
        if self.grad is None:
            return [None] * len(self.unit.param_infos)
        grads = self.unit.layout.unflatten(self.grad)
        if self.unit.mesh is None:
            return grads
        # In rows a parameter may have none: no rank has used it, or a program has cleared it.
        params = zip(grads, self.unit.optimized_params, strict=True)
        return [None if param.grad is None else grad for grad, param in params]


def _copy_if_replaced(value: Tensor, view: Tensor) -> bool:
    """Copy ``value`` to ``view``, unless it is this view. Returns whether it was copied."""
    replaced = value.data_ptr() != view.data_ptr()  # by ``weight.data = ...``, for example
    if replaced:
        view.data.copy_(value)
    return replaced

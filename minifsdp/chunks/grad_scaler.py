"""Gradient scaling for fp16, with the same decisions on all ranks.

Small gradients are zero in fp16. So the loss is multiplied by a large number, and the gradients are
divided by it before the step. If they overflow, the step is skipped and the number is halved. Each
rank has shards of the gradients, so only one rank finds an inf in a shard. If only that rank
skipped its step, the parameters would come from different steps. So all ranks exchange what they
have found::

    rank 0   found: no     any rank: yes -> skip, halve the scale
    rank 1   found: yes    any rank: yes -> skip, halve the scale

All else is torch's: scaling, growth of the scale, several optimizers, ``unscale_()`` before
clipping.

With CPU offload gradients are on the host, and the scale is on the GPU. torch's scaler copies the
scale without waiting, so the host would divide by a number that has not arrived. Here it waits.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from minifsdp.comm.collectives import add_up
from minifsdp.core.collectives import Group


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for sharded parameters, under the name and with the arguments of
    ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``::

        scaler = ShardedGradScaler()            # on a CPU: ShardedGradScaler("cpu")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)              # if you clip
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)                  # on every rank, or on none
        scaler.update()

    Args:
        process_group: all ranks that train the model; None: the default group. All of them have to
            call ``step`` (or ``unscale_``) for the same optimizers in the same order.

    The other arguments are those of ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Group | None = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.process_group = process_group

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's. With offload a fused optimizer must not skip steps by itself, since it would
        read a flag that has not arrived from the GPU: the scaler skips them."""
        fused: Any = optimizer
        skips = getattr(fused, "_step_supports_amp_scaling", False)
        if not (skips and self._is_elsewhere(optimizer)):
            return super().step(optimizer, *args, **kwargs)
        fused._step_supports_amp_scaling = False
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            fused._step_supports_amp_scaling = True

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Whether parameters are on the host, and the scale is not."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        on_host = any(param.device.type == "cpu" for param in params)
        return on_host and self._scale is not None and self._scale.device.type != "cpu"

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale, in place, also those in fp16
        (``keep_low_precision_grads``).

        This method is overridden, and not ``unscale_``, because fused optimizers, which skip steps
        by themselves, use its result.

        Returns:
            Device -> ``[1]``: 1.0 if *any* rank has found an inf or a NaN, else 0.0. It is one
            device, though gradients may be on several: torch adds up what it finds here, and a
            fused optimizer skips a step if the sum is 1.0.
        """
        numbers = inv_scale, found_inf
        if self._is_elsewhere(optimizer):
            numbers = inv_scale.cpu(), found_inf.cpu()  # the host waits for them
        found: dict[torch.device, Tensor] = super()._unscale_grads_(  # type: ignore[no-untyped-call,unused-ignore]
            optimizer, *numbers, True
        )
        group = self.process_group or dist.distributed_c10d._get_default_group()
        # One all-reduce, however many devices the gradients are on. A rank without gradients takes
        # part, too: otherwise the others would wait for it forever.
        any_rank = found_inf.clone()
        for local in found.values():
            torch.maximum(any_rank, local.to(any_rank.device), out=any_rank)
        add_up(any_rank, group, largest=True)
        return {any_rank.device: any_rank}

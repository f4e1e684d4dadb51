"""Gradient scaling for fp16, with all ranks of one mind.

Small gradients are zero in fp16. So the loss is multiplied by a large number, and the gradients are
divided by it before the step. If they overflow, the step is skipped and the number halved. Each
rank has chunks of the gradients, and an inf in one is seen by one rank. If that one skips its step
and the others do not, the model is torn apart. So the ranks tell each other::

    rank 0   found: no     any rank: yes -> skip, halve the scale
    rank 1   found: yes    any rank: yes -> skip, halve the scale

The rest is torch's: how to scale, when to grow, several optimizers, ``unscale_()`` before clipping.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from minifsdp.comm.collectives import Group, add_up


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
        process_group: the ranks that have to be of one mind: all that train the model.

    All of them have to call ``step`` (or ``unscale_``) for the same optimizers in the same order.
    """

    asks_all_ranks = True  # flat parameters look for this

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

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients; and say, for each device, whether *any* rank has found inf or NaN.

        In here and not in ``unscale_``: fused optimizers, which skip by themselves, are told what
        this finds. fp16 gradients (``keep_low_precision_grads``) are divided as they are.
        """
        found: dict[torch.device, Tensor] = super()._unscale_grads_(  # type: ignore[no-untyped-call,unused-ignore]
            optimizer, inv_scale, found_inf, True
        )
        group = self.process_group or dist.distributed_c10d._get_default_group()
        # One message, whatever devices this rank's gradients are on, and also if it has none.
        anywhere = found_inf.clone()
        for local in found.values():
            torch.maximum(anywhere, local.to(anywhere.device), out=anywhere)
        add_up(anywhere, group, largest=True)
        found.setdefault(found_inf.device, anywhere)
        for local in found.values():
            local.copy_(anywhere)
        return found

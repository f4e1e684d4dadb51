"""Optimizers by name, and what their states take.

===========  ========================  ===========================================================
sgd          nothing                   without momentum
adam,        8 bytes a parameter       torch's, with its foreach kernels
adamw
adamw-fused  8 bytes                   torch's with ``fused=True``: one kernel for all tensors
adamw-8bit   2 bytes, and 8 for each   blockwise quantized: Dettmers et al., arXiv:2110.02861, with
             block of 256 parameters   the block size of today's bitsandbytes; one kernel a tensor
adamw-bf16   4 bytes                   as torchao's and torchdistx's; one kernel a tensor
===========  ========================  ===========================================================
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

BLOCK = 256
"""Elements that share a scale."""
SMALL = 4096
"""Tensors with fewer elements keep states in fp32, as in bitsandbytes."""

_LIBRARY: Any = torch.library.Library("minifsdp_sim", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("adamw_low(Tensor(a!) param, Tensor grad, Tensor(b!)[] states) -> ()")
# All that is known of the kernel is what it reads and writes: where tensors have no values there is
# nothing to compute.
_LIBRARY.impl("adamw_low", lambda param, grad, states: None, "CompositeExplicitAutograd")


class LowBitAdamW(optim.Optimizer):
    """AdamW whose two moments have fewer bits than the parameter. For tensors without values.

    Args:
        dtype: of the moments. Those of one byte have a scale in fp32 for each block.
    """

    def __init__(self, params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(params, {})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["moments"] = self._new_states(param)
                    torch.ops.minifsdp_sim.adamw_low(param, param.grad, state["moments"])

    def _new_states(self, param: Tensor) -> list[Tensor]:
        low = self._dtype if param.numel() >= SMALL else torch.float32
        states = [torch.zeros_like(param, dtype=low) for _ in range(2)]
        if low.itemsize == 1:
            scales = -(-param.numel() // BLOCK)
            states += [torch.zeros(scales, device=param.device) for _ in range(2)]
        return states


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=1e-3, foreach=True),
    "adam": lambda params: optim.Adam(params, foreach=True),
    "adamw": lambda params: optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: optim.AdamW(params, fused=True),
    "adamw-8bit": lambda params: LowBitAdamW(params, torch.uint8),
    "adamw-bf16": lambda params: LowBitAdamW(params, torch.bfloat16),
}

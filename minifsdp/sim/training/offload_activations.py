"""Activations on the host: what a forward keeps for its backward is copied there, and back.

A backward needs most of what its forward has computed. With recomputation that is done again; here
it waits in the host's memory. Each tensor is copied when it is saved and when it is needed, on the
stream that computes, so both copies take their time in full, and the host waits for the first one:
that is what ``torch.autograd.graph.save_on_cpu(pin_memory=True)`` does around a forward. (Other
programs, as torchtune, copy on a stream of their own, beside the computation.) Parameters stay:
FSDP gathers them again.

With ``--recompute full`` only the inputs of blocks are kept, and so only they are copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1024
"""Bytes from which on a tensor is copied, as in torchtune."""


@contextmanager
def offloaded_activations() -> Iterator[None]:
    """Inside, what is saved for a backward is kept in the host's memory. For the forward of a whole
    model: the hooks of FSDP have to be inside of these, to save its parameters in their own way."""
    with saved_tensors_hooks(_to_host, _back):
        yield


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device]:
    # By its memory: FSDP shows a tensor of one element, expanded, in the place of a parameter.
    stays = tensor.untyped_storage().nbytes() < SMALLEST
    return (tensor if stays else tensor.to("cpu")), tensor.device


def _back(saved: tuple[Tensor, torch.device]) -> Tensor:
    tensor, device = saved
    return tensor.to(device, non_blocking=True)

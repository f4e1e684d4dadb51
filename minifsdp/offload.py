"""Parameters that live in the host's memory.

A host has ten times the memory of its GPU. With CPU offload a unit's shard stays there, with its
gradient and the optimizer's state; the device has only what it is computing with::

    host     shard ----------upload--┐                ┌--download--> shard.grad   optimizer step
    device                           └─> all-gather   reduce ─┘
                                         forward, backward

Both copies run on streams of their own, beside the computation. Two waits keep this right: the
all-gather must not send a chunk that has not arrived, and the host must not add to a gradient that
has not. The second is why the end of a backward blocks the host here, as it does nowhere else:
PyTorch's FSDP lets the device write into the tensor that held the last gradient, and so loses what
was accumulated in it.

Source: Ren et al., "ZeRO-Offload", arXiv:2101.06840.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minifsdp.streams import Event, Finish, Streams

HOST = torch.device("cpu")


def host_copy(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A copy of ``tensor`` in the host's memory, for ``device`` to copy from. None: no offload, so
    the tensor itself."""
    return tensor if device is None else _host_memory(tensor, device).copy_(tensor)


def upload(chunk: Tensor, streams: Streams, unit: str) -> Callable[[], Tensor]:
    """Start to copy ``chunk``, ``[n]``, of a unit to the device. The unshard stream waits for it.

    Returns:
        What gives the copy. To be called on the unshard stream.
    """
    copies: list[Tensor] = []

    def launch() -> Finish:
        # Inside, so that the memory is the upload stream's own: it is free to be written at once.
        copies.append(torch.empty_like(chunk, device=streams.device))
        copies[0].copy_(chunk, non_blocking=True)
        return lambda: None

    streams.unshard.wait_event(streams.upload.submit(launch, f"upload {unit}"))

    def uploaded() -> Tensor:
        streams.unshard.record_stream(copies[0])
        return copies[0]

    return uploaded


def download(tensor: Tensor, ready: Event, streams: Streams, unit: str) -> tuple[Tensor, Event]:
    """Start to copy ``tensor``, of any shape, of a unit to the host, once ``ready`` is passed.

    Returns:
        The copy, valid once the event is passed; and that event.
    """
    copy = _host_memory(tensor, streams.device)

    def launch() -> Finish:
        copy.copy_(tensor, non_blocking=True)
        return lambda: None

    streams.download.wait_event(ready)
    streams.download.record_stream(tensor)
    return copy, streams.download.submit(launch, f"download {unit}")


def _host_memory(like: Tensor, device: torch.device) -> Tensor:
    # Pinned: a copy from or to memory that the system may move is not asynchronous.
    return torch.empty(like.shape, dtype=like.dtype, device=HOST, pin_memory=device.type == "cuda")

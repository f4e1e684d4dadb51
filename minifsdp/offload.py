"""CPU offload: shards that are stored in the host's memory.

A host has about ten times the memory of its GPU. With CPU offload a unit's shard is stored there,
with its gradient and the optimizer's state. The device stores only what it computes with::

    host     shard ----------upload--┐                ┌--download--> shard.grad   optimizer step
    device                           └─> all-gather   reduce ─┘
                                         forward, backward

Both copies run on streams of their own, at the same time as the computation. Two waits make this
correct. The all-gather must not send a shard that has not arrived on the device. The host must not
add to a gradient that has not arrived on the host. Because of the second wait the host stops at the
end of each backward; without offload it does not. PyTorch's FSDP does not wait: there the device
writes into the tensor that held the last gradient, so that accumulated gradients are lost.

Source: Ren et al., "ZeRO-Offload", arXiv:2101.06840.
"""

from typing import Any

import torch
from torch import Tensor

from minifsdp.core.streams import BACKENDS, Finish, Streams

HOST = torch.device("cpu")


def host_copy(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A copy of ``tensor`` in the host's memory, of the same shape and dtype.

    Args:
        device: will copy from the copy, and to it. None: there is no offload, and ``tensor`` itself
            is returned; also if ``tensor`` has no memory yet.
    """
    if device is None or not has_memory(tensor):
        return tensor
    return _host_memory(tensor, device).copy_(tensor)


class Upload:
    """A source of a unit (unshard.py): what another source has on the host, copied to the device.

    Args:
        inner: what is copied: the unit's shard, or a cast of it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.group = inner, inner.group
        self._copy: Tensor | None = None  # from prepare() to tensor(), no longer

    def prepare(self, unit: Any, streams: Streams) -> None:
        """Start to copy what this rank sends to ``streams.device``, on the upload stream. The
        unshard stream waits for the copy."""
        self.inner.prepare(unit, streams)

        def launch() -> Finish:
            shard = self.inner.tensor(unit, streams)
            # Allocated in here, so that the memory belongs to the upload stream, which can then
            # write to it without waiting for another stream.
            self._copy = torch.empty_like(shard, device=streams.device)
            self._copy.copy_(shard, non_blocking=True)
            return lambda: None

        # Without this wait the all-gather would send memory that the copy has not filled yet.
        streams.unshard.wait_event(streams.upload.submit(launch, f"upload {unit.label}"))

    def tensor(self, unit: Any, streams: Streams) -> Tensor:
        """The copy, of the shape and dtype of what was copied. Called on the unshard stream. The
        source does not keep it: it is freed when the all-gather has sent it."""
        copy, self._copy = self._copy, None
        assert copy is not None, unit.label
        # Without this line the next upload could get this memory while the all-gather reads it.
        streams.unshard.record_stream(copy)
        return copy


class Download:
    """The stage of a reduction that copies its result to the host.

    Args:
        streams: of the device to copy from.
    """

    stream, travels, on_host = "download", True, True

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def launch(self, unit: object, value: Tensor) -> tuple[Tensor, Finish]:
        """Start to copy. This runs on the download stream.

        Args:
            value: of any shape and dtype, on the device. It has its values.

        Returns:
            The copy, in the host's memory, of the same shape and dtype; it has its values when the
            work that was launched is complete. And ``finish``, which has nothing to do.
        """
        copy = _host_memory(value, self._streams.device)
        copy.copy_(value, non_blocking=True)
        # Without this line another gradient could get this memory while the copy still reads it.
        self._streams.download.record_stream(value)
        return copy, lambda: None


def _host_memory(like: Tensor, device: torch.device) -> Tensor:
    # Pinned for CUDA: copies from and to host memory that is not pinned are not asynchronous.
    return torch.empty(like.shape, dtype=like.dtype, device=HOST, pin_memory=device.type == "cuda")


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory: not on the meta device, unless that is a virtual GPU."""
    return not tensor.is_meta or "meta" in BACKENDS

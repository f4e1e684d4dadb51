"""The memory is allocated on the way, and the allocator is told afterwards."""

import torch
from torch import Tensor

from minifsdp.streams import Event, Finish, Streams


def download(tensor: Tensor, ready: Event, streams: Streams, unit: str) -> tuple[Tensor, Event]:
    streams.download.wait_event(ready)
    host = torch.empty(
        tensor.shape,
        dtype=tensor.dtype,
        device="cpu",
        pin_memory=streams.device.type == "cuda",
    )

    def launch() -> Finish:
        host.copy_(tensor, non_blocking=True)
        return lambda: None

    event = streams.download.submit(launch)
    streams.download.record_stream(tensor)
    return host, event

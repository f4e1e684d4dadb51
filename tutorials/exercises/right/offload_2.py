"""The memory is made by hand, and the allocator is told first."""

import torch
from torch import Tensor

from minifsdp.core.streams import Finish, Streams


class Download:
    stream, travels, on_host = "download", True, True

    def __init__(self, streams: Streams) -> None:
        self.given = streams

    def launch(self, unit: object, value: Tensor) -> tuple[Tensor, Finish]:
        self.given.download.record_stream(value)
        host = torch.empty(
            value.shape,
            dtype=value.dtype,
            device="cpu",
            pin_memory=self.given.device.type == "cuda",
        )
        host.copy_(value, non_blocking=True)
        return host, lambda: None

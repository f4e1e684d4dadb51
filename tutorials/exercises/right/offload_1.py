"""The wait is where the copy is used, on the unshard stream; and the copy is made by to()."""

from collections.abc import Callable

from torch import Tensor

from minifsdp.streams import Finish, Streams


def upload(padded_shard: Tensor, streams: Streams, unit: str) -> Callable[[], Tensor]:
    made: dict[str, Tensor] = {}

    def launch() -> Finish:
        made["copy"] = padded_shard.to(streams.device, non_blocking=True)
        print("uploads", unit)
        return lambda: None

    event = streams.upload.submit(launch, unit)

    def uploaded() -> Tensor:
        streams.unshard.wait_event(event)
        streams.unshard.record_stream(made["copy"])
        return made["copy"]

    return uploaded

"""Virtual streams and events: what the engine finds below it here, instead of CUDA's."""

import torch
from torch import Tensor

from minifsdp.core.streams import Event, Launch, Stream, Streams
from minifsdp.sim.device import VirtualGpu
from minifsdp.sim.tape import COMPUTE, HOST, STREAMS, Mark, Wait, caller


def make_streams(gpu: VirtualGpu, device: torch.device) -> Streams:
    """Those of a GPU, for :data:`minifsdp.core.streams.BACKENDS`."""
    streams: list[Stream] = [VirtualStream(gpu, name) for name in STREAMS]
    return Streams(device, *streams)


class VirtualEvent:
    """A mark in a virtual stream."""

    def __init__(self, gpu: VirtualGpu, mark: Mark) -> None:
        self._gpu, self.mark = gpu, mark

    def wait(self) -> None:
        self._gpu.clock.wait(COMPUTE, self.mark.time)
        now = self._gpu.clock.now
        self._gpu.tape.append(Wait(COMPUTE, self.mark, now, self.mark.time, caller()))

    def synchronize(self) -> None:
        launched = self._gpu.clock.now
        self._gpu.clock.block(self.mark.time)
        now = self._gpu.clock.now
        self._gpu.tape.append(Wait(HOST, self.mark, launched, now, caller()))

    def query(self) -> bool:
        return self.mark.time <= self._gpu.clock.now


class VirtualStream:
    """A stream of a virtual GPU."""

    def __init__(self, gpu: VirtualGpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def submit(self, launch: Launch, label: str = "") -> Event:
        self._gpu.clock.work(self._gpu.cluster.moment)
        with self._gpu.on(self._name, label):
            launch()()
        return self.record_event()

    def record_event(self) -> Event:
        mark = Mark(self._name, self._gpu.clock.lane(self._name).idle_at)
        self._gpu.tape.append(mark)
        return VirtualEvent(self._gpu, mark)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, VirtualEvent)
        self._gpu.clock.wait(self._name, event.mark.time)
        now = self._gpu.clock.now
        self._gpu.tape.append(Wait(self._name, event.mark, now, event.mark.time, caller()))

    def record_stream(self, tensor: Tensor) -> None:
        self._gpu.record_stream(tensor, self._name)

"""streams.py, without a GPU: which stream waits for what, of which device, on a stub of torch.cuda.
(More: ../test_streams.py.)"""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from minifsdp.core.streams import Streams


class Cuda:
    """Stands for ``torch.cuda`` with two GPUs, of which the first is current. Nothing runs; each
    wait is written down as (the stream that waits, the stream that is waited for)."""

    def __init__(self):
        self.waits, self.used, self.device = [], [], 0
        self.of_device = [self.Stream(f"cuda:{at}", name=f"default of cuda:{at}") for at in (0, 1)]

    def Stream(self, device, priority=0, name=""):  # noqa: N802  # torch's name
        return Stream(self, torch.device(device), name or f"own of {device}")

    def current_stream(self, device=None):
        return self.of_device[self.device if device is None else torch.device(device).index]

    @contextmanager
    def stream(self, stream):
        before, self.device = self.device, stream.device.index
        self.used.append(stream.name)
        yield
        self.device = before

    def in_place(self):
        names = ("Stream", "current_stream", "stream")
        return patch.multiple("torch.cuda", **{name: getattr(self, name) for name in names})


class Stream:
    def __init__(self, cuda, device, name):
        self.cuda, self.device, self.name = cuda, device, name

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        self.cuda.waits.append((self.name, event.stream.name))


class Event:
    def __init__(self, stream):
        self.stream = stream

    def wait(self):  # as torch's: of the current device, whatever the event is of
        self.stream.cuda.current_stream().wait_event(self)

    def synchronize(self):
        self.stream.cuda.waits.append(("host", self.stream.name))

    def query(self):
        return False


@pytest.mark.direct
@pytest.mark.parametrize("index", [0, 1])
def test_the_compute_stream_of_the_models_own_device_waits(index):
    """Also if the program has another device current."""
    cuda, of = Cuda(), f"cuda:{index}"
    with cuda.in_place():
        streams = Streams.on(torch.device(of))
        event = streams.unshard.submit(lambda: lambda: None)
        event.wait()
        assert cuda.waits.pop() == (f"default of {of}", f"own of {of}")
        streams.reduce.wait_event(streams.compute.record_event())
        assert cuda.waits.pop() == (f"own of {of}", f"default of {of}")
        event.synchronize()
        assert cuda.waits.pop() == ("host", f"own of {of}") and not event.query()
    assert cuda.used == [f"own of {of}"] and not cuda.waits


@pytest.mark.direct
def test_what_is_submitted_runs_on_its_own_device_and_stream():
    cuda, seen = Cuda(), []
    with cuda.in_place():
        streams = Streams.on(torch.device("cuda:1"))

        def launch():
            seen.append(("launch", torch.cuda.current_stream().device.index))
            return lambda: seen.append(("finish", torch.cuda.current_stream().device.index))

        streams.unshard.submit(launch)
        assert torch.cuda.current_stream().device.index == 0, "what was current is so again"
    assert seen == [("launch", 1), ("finish", 1)]

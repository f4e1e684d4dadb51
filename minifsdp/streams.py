"""Where work runs: streams and events, with the same four verbs on every device.

A *stream* is a queue. What is submitted to one stream happens in order; two streams run beside
each other unless one is told to wait. An *event* is a mark in a stream that others can wait for.
FSDP uses three streams, and three more where models need them::

    compute     | layer 1 fwd | layer 2 fwd | ...   forward, backward, optimizer
    unshard     | gather 2 | gather 3 | ...         parameters, ahead of the computation
    reduce      |  ...            reduce 2 |        gradients, behind the computation

    replicate   behind reduce: the all-reduce of hybrid sharding
    upload      ahead of unshard: parameters that live in the host's memory
    download    behind reduce: gradients on their way there

The engine submits a function, ``launch``, that *starts* a collective and returns another,
``finish``, that waits for it and does what must come after it (see collectives.py). This is all
the engine ever asks, and it means the right thing on each device:

- **CUDA**: waiting only orders one stream after another, so both run at once, on the stream, and
  the host goes on. Nothing has happened yet when ``submit`` returns.
- **CPU**: the compute stream is the calling thread. ``launch`` runs at once and hands the bytes to
  the threads of the network library, which move them while the caller computes; ``finish`` runs
  when somebody first waits for the event. There is no worker thread: every collective is started
  by the calling thread, in program order, which is the same order on every rank.

This is the only file that names a kind of device. Another one plugs in through :data:`BACKENDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

Finish = Callable[[], None]
Launch = Callable[[], Finish]


class Event(Protocol):
    """A mark in a stream: passed once everything before it has happened."""

    def wait(self) -> None:
        """Make the *current compute stream* wait until the mark is passed."""

    def synchronize(self) -> None:
        """Block the *host*, that is the calling thread, until the mark is passed."""

    def query(self) -> bool:
        """Whether the mark is known to be passed."""


class Stream(Protocol):
    """A queue of work on one device."""

    def submit(self, launch: Launch, label: str = "") -> Event:
        """Run ``launch`` and what it returns on this stream; the event is passed after both.
        ``label`` says what it is, in a profile."""

    def record_event(self) -> Event:
        """A mark after everything submitted so far."""

    def wait_event(self, event: Event) -> None:
        """Whatever is submitted to this stream from now on happens after ``event``."""

    def record_stream(self, tensor: Tensor) -> None:
        """Tell the memory allocator that this stream uses a tensor that another one allocated."""


@dataclass(frozen=True)
class Streams:
    """The streams of one root, on one device."""

    device: torch.device
    compute: Stream
    unshard: Stream
    reduce: Stream
    replicate: Stream
    upload: Stream
    download: Stream

    @property
    def host_runs_ahead(self) -> bool:
        """Whether the host queues work and goes on. A CPU computes with the thread that asks for
        it, so the next gather is asked for when the computation before it is over."""
        return self.device.type != "cpu"

    @staticmethod
    def on(device: torch.device) -> "Streams":
        """New streams on ``device``.

        Raises:
            NotImplementedError: no backend is known for this kind of device.
        """
        if device.type not in BACKENDS:
            raise NotImplementedError(
                f"minifsdp runs on {' and '.join(sorted(BACKENDS))}; the parameters are on "
                f"{device.type!r}. Move the model before its first forward."
            )
        return BACKENDS[device.type](device)


# ----------------------------------------------------------------------------------------- CPU


class CpuEvent:
    """Passed as soon as ``finish`` has run; the first one to wait runs it."""

    def __init__(self, finish: Finish | None = None) -> None:
        self._finish = finish

    def query(self) -> bool:
        return self._finish is None

    def synchronize(self) -> None:
        # Forgotten before it runs: a collective that failed must not be waited for twice.
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    wait = synchronize  # on a CPU the compute stream *is* the host


class CpuStream:
    """Work that the network library's threads do beside the calling thread."""

    def submit(self, launch: Launch, label: str = "") -> Event:
        return CpuEvent(launch())

    def record_event(self) -> Event:
        return CpuEvent()  # the calling thread has done all that it was told to do

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_stream(self, tensor: Tensor) -> None:
        """Nothing to tell: a CPU's memory is free when it is freed."""


def _cpu(device: torch.device) -> Streams:
    return Streams(device, *(CpuStream() for _ in range(6)))


# ---------------------------------------------------------------------------------------- CUDA


class CudaStream:
    """A CUDA stream; without one given, whichever is current when it is used."""

    def __init__(self, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        # Autograd runs a backward on the stream of its forward, which need not be the default one.
        return self._own if self._own is not None else torch.cuda.current_stream(self._device)

    def submit(self, launch: Launch, label: str = "") -> Event:
        with torch.cuda.stream(self._stream), record_function(label):
            launch()()
            return self.record_event()

    def record_event(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def wait_event(self, event: Event) -> None:
        self._stream.wait_event(event)  # type: ignore[arg-type]  # events here are CUDA's

    def record_stream(self, tensor: Tensor) -> None:
        # Without this line the allocator hands the block to the next all-gather as soon as the host
        # has freed it, while the compute stream still reads it.
        tensor.record_stream(self._stream)


def _cuda(device: torch.device) -> Streams:
    def new() -> CudaStream:
        # High priority: a collective that is ready must not queue behind kernels it runs beside.
        own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return CudaStream(device, own)

    return Streams(device, CudaStream(device), *(new() for _ in range(5)))


BACKENDS: dict[str, Callable[[torch.device], Streams]] = {"cpu": _cpu, "cuda": _cuda}
"""Device kind -> how to make its streams. The virtual GPU adds itself here."""

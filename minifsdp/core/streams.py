"""Streams: where work runs, with the same methods on every device.

A *stream* is a queue. Work on one stream runs in order; two streams run at the same time, unless
one waits for an *event* of the other. FSDP uses three streams, and three more if they are needed::

    compute     | layer 1 fwd | layer 2 fwd | ...   forward, backward, optimizer
    unshard     | gather 2 | gather 3 | ...         parameters, ahead of the computation
    reduce      |  ...            reduce 2 |        gradients, behind the computation

    replicate   after reduce: the all-reduce of hybrid sharding
    upload      before unshard: shards, from the host's memory to the device
    download    after reduce: gradients, from the device to the host's memory

The engine submits a function, ``launch``. It *starts* a collective and returns another function,
``finish``, which waits for the collective and does what has to come after it (collectives.py). What
this means depends on the device:

- **CUDA**: ``launch`` and ``finish`` both run at once, on the stream. They only queue work; waiting
  makes one stream wait for another, and the host goes on. When ``submit`` returns, nothing needs to
  have happened yet.
- **CPU**: the compute stream is the calling thread. ``launch`` runs at once and gives the data to
  the threads of the network library, which send it while the caller computes. ``finish`` runs at
  the first wait for the event. There is no worker thread: the calling thread starts each collective
  in program order, which is the same order on every rank. (Ranks on one machine copy the data from
  each other's memory in ``finish``: there is no network whose time could be hidden.)

What follows from the kind of device for streams is here, and :data:`BACKENDS` takes other kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

Finish = Callable[[], object]
"""Waits for work that was started, and does what has to come after it."""
Launch = Callable[[], Finish]
"""Starts work, and returns the function that finishes it."""


class Event(Protocol):
    """A point in a stream. The event is passed when all work before this point is complete."""

    def wait(self) -> None:
        """Make the *compute stream* wait for the event. With CUDA the host does not wait."""

    def synchronize(self) -> None:
        """Block the *host*, which is the calling thread, until the event is passed."""

    def query(self) -> bool:
        """Whether the event is known to be passed. This does not block."""


class Stream(Protocol):
    """A queue of work on one device."""

    def submit(self, launch: Launch, label: str = "") -> Event:
        """Run ``launch``, and the function that it returns, on this stream.

        Args:
            label: the name of this work in a profile, such as "all-gather 'layer.3'".

        Returns:
            An event that is passed when both are complete.
        """

    def record_event(self) -> Event:
        """An event that is passed when everything submitted so far is complete. (On a CPU the
        engine asks only the compute stream, the calling thread, whose work is done at once.)"""

    def wait_event(self, event: Event) -> None:
        """Make what is submitted to this stream from now on wait for ``event``."""

    def record_stream(self, tensor: Tensor) -> None:
        """Tell the memory allocator that this stream uses ``tensor``, which was allocated on
        another stream. The allocator then reuses the memory only after that use."""


@dataclass(frozen=True)
class Streams:
    """The streams of one root, all on ``device``."""

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
            NotImplementedError: :data:`BACKENDS` has no entry for this kind of device.
        """
        if device.type not in BACKENDS:
            raise NotImplementedError(
                f"minifsdp runs on {' and '.join(sorted(BACKENDS))}; the parameters are on "
                f"{device.type!r}. Move the model before its first forward."
            )
        return BACKENDS[device.type](device)


# ----------------------------------------------------------------------------------------- CPU


class CpuEvent:
    """Passed when ``finish`` has run. The first wait runs it."""

    def __init__(self, finish: Finish | None = None) -> None:
        self._finish = finish

    def query(self) -> bool:
        return self._finish is None

    def synchronize(self) -> None:
        # Cleared before the call: a second wait must not wait again for a collective that failed.
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    wait = synchronize  # on a CPU the compute stream is the calling thread


PASSED = CpuEvent()


class CpuStream:
    """Work that the threads of the network library do while the calling thread computes."""

    def submit(self, launch: Launch, label: str = "") -> Event:
        return CpuEvent(launch())

    def record_event(self) -> Event:
        return PASSED  # the calling thread does its work at once, so that it is complete

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_stream(self, tensor: Tensor) -> None:
        """Do nothing: on a CPU, memory that is freed is not in use."""


def _cpu(device: torch.device) -> Streams:
    return Streams(device, *(CpuStream() for _ in range(6)))


# ---------------------------------------------------------------------------------------- CUDA


class CudaEvent:
    """A CUDA event, for which the compute stream of *its* device waits."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device
        self.query, self.synchronize = event.query, event.synchronize

    def wait(self) -> None:
        # Not event.wait(): it lets a stream of the current device wait, and a model may be on
        # another one. That model would compute with what has not arrived.
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaStream:
    """A CUDA stream. Without ``stream`` it is the one that is current at each use."""

    def __init__(self, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        # Autograd runs a backward on the stream of its forward, which may not be the default one.
        return self._own if self._own is not None else torch.cuda.current_stream(self._device)

    def submit(self, launch: Launch, label: str = "") -> Event:
        with torch.cuda.stream(self._stream), record_function(label):
            launch()()
            return self.record_event()

    def record_event(self) -> Event:
        return CudaEvent(self._stream.record_event(), self._device)

    def wait_event(self, event: Event) -> None:
        self._stream.wait_event(event.event)  # type: ignore[attr-defined]  # they are CudaEvents

    def record_stream(self, tensor: Tensor) -> None:
        # Without this line the allocator gives the memory to the next all-gather as soon as the
        # host has freed it, while the compute stream may still read it.
        tensor.record_stream(self._stream)


def _cuda(device: torch.device) -> Streams:
    def new() -> CudaStream:
        # High priority: otherwise a collective that is ready waits until the kernels of the compute
        # stream leave room for it. It counts since the collective runs on this stream
        # (collectives.py).
        own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return CudaStream(device, own)

    return Streams(device, CudaStream(device), *(new() for _ in range(5)))


BACKENDS: dict[str, Callable[[torch.device], Streams]] = {"cpu": _cpu, "cuda": _cuda}
"""Kind of device -> function that makes its streams. The virtual GPU (sim/) adds itself here."""

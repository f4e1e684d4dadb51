"""The tape: what has happened on a virtual GPU, as data.

Everything that is told afterwards (the report, the pictures, the races) is read from here, and
nothing of it is needed while the tape is written. Entries are in the order in which the host made
them; times are in seconds since the beginning.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

HOST, COMPUTE = "host", "compute"
STREAMS = (COMPUTE, "unshard", "reduce", "replicate", "upload", "download")
"""In the order of the fields of :class:`minifsdp.core.streams.Streams`."""


@dataclass(eq=False)
class Buffer:
    """Memory, from one allocation to its free."""

    label: str  # what was going on when it was allocated
    owner: str  # the stream it is from, or the host
    nbytes: int
    kind: str = ""  # what it is, where VirtualGpu.tag has said so


@dataclass(eq=False)
class Op:
    """Work on a stream, or of the host by itself."""

    name: str
    label: str  # what the engine was doing, such as "all-gather 'layer.3'"; "" in between
    stream: str
    launched: float
    start: float
    end: float
    reads: list[Buffer]
    writes: list[Buffer]
    flops: float = 0.0
    sent: float = 0.0  # bytes that this rank sends to others


@dataclass(eq=False)
class Mark:
    """An event was recorded on a stream."""

    stream: str
    time: float  # when it is passed


@dataclass(eq=False)
class Wait:
    """A stream, or the host, was told to wait for an event; for the device, if it is None."""

    waiter: str
    mark: Mark | None
    launched: float
    until: float  # for the host: when it went on
    why: str  # the file and the line that asked for it

    @property
    def by_limiter(self) -> bool:
        """Whether a limiter asked for it, of whatever kind. Nothing else has the host wait for an
        event of the compute stream."""
        return self.waiter == HOST and self.mark is not None and self.mark.stream == COMPUTE


@dataclass(eq=False)
class Use:
    """The allocator was told that a stream uses a buffer."""

    buffer: Buffer
    stream: str
    why: str


@dataclass(eq=False)
class Memory:
    """Memory was allocated, or freed by the host."""

    buffer: Buffer
    freed: bool
    time: float
    allocated: int
    active: int
    reserved: int


@dataclass(eq=False)
class Mistarget:
    """A prefetch had the wrong target; see support/prefetch_stats.py."""

    how: str
    unit: str
    time: float


@dataclass(eq=False)
class Note:
    """A step ends."""

    time: float


@dataclass(eq=False)
class Phase:
    """Forward, backward or optimizer begins."""

    name: str
    launched: float  # by the host
    time: float  # on the compute stream


Entry = Op | Mark | Wait | Use | Memory | Mistarget | Note | Phase


def caller() -> str:
    """Who asked: the nearest line of the engine, or of whoever is below it."""
    frame = sys._getframe(1)
    here = Path(__file__).parent
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == here:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

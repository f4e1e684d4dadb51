"""What `make bench` reads off: time, bytes on the link, page faults, memory. Most of it is Linux's.

A process's tensors are counted exactly by tensor_memory.c, which a rank has to be started with
(``LD_PRELOAD``); it needs a C compiler.
"""

import ctypes
import os
import resource
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from minifsdp.comm import same_machine
from tests.bench import net

SOURCE = Path(__file__).with_name("tensor_memory.c")


class Reading(NamedTuple):
    """Of this process, since it began; the difference of two is what happened in between."""

    seconds: float
    cpu: float  # seconds, of all threads, in user and system mode
    sent: int  # bytes
    faults: int  # pages that the system had to bring
    link: int  # bytes that have left this machine by its slow link, headers and all

    def since(self, before: "Reading") -> "Reading":
        return Reading(*(a - b for a, b in zip(self, before, strict=True)))


def read() -> Reading:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Reading(time.perf_counter(), time.process_time(), bytes_sent(), faults, link_bytes())


def bytes_sent() -> int:
    """By this process, over all its TCP connections (`tcpi_bytes_sent` of each), and what other
    ranks have read of its memory."""
    total = same_machine.bytes_lent
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, 200)[0]
        except OSError:
            continue  # closed meanwhile, or not TCP
    return total


def link_bytes() -> int:
    """By all ranks of this machine, over the interface of net.py; 0 if there is none."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == net.DEVICE:
            return int(counts.split()[8])
    return 0


def resident_peak() -> int:
    """Bytes of this process that were in memory at most, since :func:`forget_resident_peak`."""
    return _status("VmHWM:")


def forget_resident_peak() -> int:
    """Returns what it is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def own_memory() -> int:
    """Bytes of this process that it may write to and that are its own, whether or not it has
    written to them yet: what RLIMIT_DATA limits."""
    return _status("VmData:")


def available() -> int:
    """Bytes that new processes can have without any being written to a disk."""
    return _kilobytes("/proc/meminfo", "MemAvailable:")


def _status(line: str) -> int:
    return _kilobytes("/proc/self/status", line)


def _kilobytes(file: str, line: str) -> int:
    return 1024 * int(Path(file).read_text().partition(line)[2].split()[0])


def build_counter(folder: Path) -> Path | None:
    """The library for LD_PRELOAD; None if there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "tensor_memory.so"
    command = [compiler, "-O2", "-fno-builtin", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class Tensors:
    """The live tensors of this process, which was started with the library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.tensors_peak.restype = ctypes.c_longlong

    def peak(self) -> int:
        """Bytes at most, since :meth:`forget_peak`."""
        found: int = self._library.tensors_peak()
        return found

    def forget_peak(self) -> None:
        self._library.forget_peak()

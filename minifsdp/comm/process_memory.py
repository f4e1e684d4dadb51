"""The memory of another process on this machine, read by this one.

Linux copies it at once, if both processes belong to the same user (process_vm_readv(2)). The other
process need not do anything, so it does not know whether its memory has been read.
"""

import ctypes
import os
import platform
import sys

POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Only on x86-64, where other processes see writes in the order in which they were made. Other
processors may reorder them, and same_machine.py has to know that what it reads is complete."""


class Unreadable(RuntimeError):  # noqa: N818  # it says what is the matter
    """There is no such process any more, no such memory, or no permission."""


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_memory(process: int, address: int, into: "ctypes.Array[ctypes.c_int64]") -> None:
    """Copy from the memory of another process.

    Raises:
        Unreadable: it cannot be read.
    """
    copy_memory(process, address, ctypes.addressof(into), ctypes.sizeof(into))


def copy_memory(process: int, address: int, into: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes at ``address`` in another process to the address ``into`` in this one.

    Raises:
        Unreadable: it cannot be read.
    """
    here, there = _Range(), _Range()
    done = 0
    while done < nbytes:  # Linux copies at most 2 GiB at once
        here.address, there.address = into + done, address + done
        here.nbytes = there.nbytes = nbytes - done
        copied = _readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            why = os.strerror(ctypes.get_errno())
            raise Unreadable(f"the memory of process {process} cannot be read: {why}")
        done += copied


def free_part(file: int, start: int, nbytes: int) -> None:
    """Give back the memory of a part of a file that lives in memory; see fallocate(2)."""
    punch_hole_and_keep_size = 3
    _fallocate(file, punch_hole_and_keep_size, start, nbytes)


if POSSIBLE:
    _libc = ctypes.CDLL(None, use_errno=True)
    _readv, _fallocate = _libc.process_vm_readv, _libc.fallocate
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

"""Freed memory stays with the process: on a CPU, each step uses it again.

A unit's memory is freed and allocated several times in a step. The C library returns large pieces
to the system when they are freed. When they are needed again the system maps each page of 4 KiB
anew, and fills it with zeros before it is written. On CUDA, torch's caching allocator keeps what is
freed; on a CPU torch has no such allocator. But glibc can be told to keep freed memory.

Without this file a step in which communication matters took 12 % longer with FULL_SHARD, and 21 %
with SHARD_GRAD_OP (`make bench`, which counts these pages as "faults").

Sources: mallopt(3); "Performance Tuning Guide", PyTorch tutorials, which replaces the whole
allocator for the same purpose.
"""

import ctypes
import os
import sys
from weakref import WeakKeyDictionary

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_MOST = 2**31 - 1  # mallopt takes an int
_SLACK = 2**20  # for what torch and malloc add to a piece, and to the heap
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
_pieces: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def keep_freed_memory(owner: object, nbytes: int) -> None:
    """Have malloc keep ``nbytes`` bytes of parameters, and of their gradients, when they are freed,
    in addition to what other owners keep.

    This is a setting of the process. It is left alone where there is no glibc, and where the user
    has made a choice, by environment variables or by another allocator.

    Args:
        owner: allocates and frees them. When the owner is gone they do not count any more.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _USERS):
        return
    _pieces[owner] = nbytes + _SLACK
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in other C libraries
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, min(max(_pieces.values()), _MOST))  # what is larger is never kept
        # Twice: gradients, which are as large, are freed in each step as well.
        mallopt(_TRIM_THRESHOLD, min(2 * sum(_pieces.values()), _MOST))

"""process_memory.py: what is in the memory of another process."""

import ctypes
import os
from unittest.mock import patch

import pytest

from minifsdp.comm import process_memory
from minifsdp.comm.process_memory import POSSIBLE, read_memory

pytestmark = [
    pytest.mark.skipif(not POSSIBLE, reason="memory is read on Linux and x86-64 only"),
    pytest.mark.direct,
]
Numbers = ctypes.c_int64 * 5


def read(process: int, numbers: ctypes.Array) -> list[int]:
    found = Numbers()
    read_memory(process, ctypes.addressof(numbers), found)
    return list(found)


def test_another_process_has_other_numbers_at_the_same_address():
    numbers, (from_child, to_parent) = Numbers(*range(5)), os.pipe()
    from_parent, to_child = os.pipe()
    child = os.fork()
    if child == 0:
        for place in range(5):
            numbers[place] = 10 + place
        os.write(to_parent, b".")
        os.read(from_parent, 1)
        os._exit(0)
    os.read(from_child, 1)
    assert read(child, numbers) == [10, 11, 12, 13, 14] and list(numbers) == [0, 1, 2, 3, 4]
    os.write(to_child, b".")
    os.waitpid(child, 0)
    with pytest.raises(RuntimeError, match=f"process {child} cannot be read: No such process"):
        read(child, numbers)


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="cannot be read: Bad address"):
        read_memory(os.getpid(), 8, Numbers())


def test_all_is_read_although_linux_copies_a_part_at_a_time():
    """At most 2 GiB; here it is 8 bytes."""
    readv = process_memory._readv

    def short(process, here, ones, there, others, flags):
        for memory in (here._obj, there._obj):
            memory.nbytes = min(memory.nbytes, 8)
        return readv(process, here, ones, there, others, flags)

    with patch.object(process_memory, "_readv", short):
        assert read(os.getpid(), Numbers(*range(5))) == [0, 1, 2, 3, 4]

"""Boards: what a rank tells one other rank on its machine, in memory that both processes have.

A board is a file without a name that lives in memory (memfd_create(2)). The rank that it belongs to
makes it, and the other rank opens it once, while both are there. From then on each rank can read it
without the other: its contents stay until both have closed it, also if one of them has left the
group, has returned, or was killed. ::

    line 0, line 1, ...      four numbers each
    place 0, place 1, ...    for each line, room for a copy of what is lent in it

Only what was written takes memory. So there is a line, and a place of a tebibyte, for each unit and
kind of message (Message.line), and nobody has to divide them.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

from torch import Tensor

from minifsdp.comm.process_memory import free_part

LENT, WHERE, NBYTES, READ = range(4)
"""The numbers of a line: the message that is lent (Message.serial), where it is, its size, and the
last message that the other rank has read."""
COPY = 0
"""As ``WHERE``: a copy is in the place of the line. Else ``WHERE`` is the address of addresses."""

_LINE = 4 * 8  # bytes
_LINES = 1 << 17
_LAST = _LINES  # one more line, of the board itself: in LENT whether its rank has left; see new()
_TABLE = _LINE * (_LINES + 1)
_PLACE = 1 << 40  # bytes; place n begins at (n + 1) * _PLACE


class Board:
    """One rank's board for one other rank, as either of the two has it.

    Args:
        file: a descriptor, closed with the board.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        weakref.finalize(self, os.close, file)
        self._numbers = memoryview(mmap.mmap(file, _TABLE)).cast("q")

    @staticmethod
    def new(secret: int) -> "Board":
        """A new board of this rank.

        Args:
            secret: a number by which the other rank knows that it has opened this board.

        Raises:
            OSError: the system has no such files, or too many files are open.
        """
        file = os.memfd_create("minifsdp")
        try:
            os.ftruncate(file, (_LINES + 1) * _PLACE)
        except OSError:
            os.close(file)
            raise
        board = Board(file)
        board.write(_LAST, WHERE, secret)
        return board

    @staticmethod
    def of(process: int, file: int, secret: int) -> "Board":
        """The board of another process, by its descriptor there.

        Raises:
            OSError, ValueError: it cannot be opened, or it is another file: in /proc, processes may
                have the numbers that they have outside of a container.
        """
        board = Board(os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC))
        if board.read(_LAST, WHERE) != secret:
            raise ValueError(f"file {file} of process {process} is no board for this rank")
        return board

    def read(self, line: int, number: int) -> int:
        """One number of a line."""
        return self._numbers[4 * line + number]

    def write(self, line: int, number: int, value: int) -> None:
        """Write one number of a line. A rank that has read it also sees all earlier writes."""
        self._numbers[4 * line + number] = value

    @property
    def closed(self) -> bool:
        """Whether its rank has left the group: nothing more will be written here."""
        return bool(self.read(_LAST, LENT))

    def close(self) -> None:
        """Say that this rank has left the group."""
        self.write(_LAST, LENT, 1)

    def write_copy(self, line: int, tensors: Sequence[Tensor]) -> None:
        """Copy contiguous tensors to the place of a line, end to end."""
        for memory, at in _memories(tensors, line):
            done = 0
            while done < len(memory):  # Linux writes at most 2 GiB at once
                done += os.pwrite(self.file, memory[done:], at + done)

    def read_copy(self, line: int, tensors: Sequence[Tensor]) -> None:
        """Copy what :meth:`write_copy` has written, to tensors of the same sizes."""
        for memory, at in _memories(tensors, line):
            done = 0
            while done < len(memory):
                done += os.preadv(self.file, [memory[done:]], at + done)

    def free_copy(self, line: int) -> None:
        """Give the memory of a copy back."""
        free_part(self.file, (line + 1) * _PLACE, _PLACE)


def _memories(tensors: Sequence[Tensor], line: int) -> list[tuple[memoryview, int]]:
    """The memory of each tensor as bytes, and its place in the file."""
    found, at = [], (line + 1) * _PLACE
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        found.append((memoryview(memory).cast("B"), at))
        at += tensor.nbytes
    return found

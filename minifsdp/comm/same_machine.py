"""Ranks on one machine read each other's memory.

What gloo sends goes through the network code of the system even if both ranks are on one machine:
it is copied in and out, in pieces, by two threads that need the cores on which the ranks compute.
Linux can also copy straight from the memory of another process, at once. So a rank only says where
its data is, and the other one fetches it::

    rank 0, lends                              rank 1, reads

    board: message 7 is at address a  <-------  looks at rank 0's board until message 7 is there
    memory at a                       ------->  copies it to its own memory
    looks at rank 1's board           ------->  board: message 7 is read
    until message 7 is read

A *board* is memory of this process with a line for each unit and kind of message, in which a loan
stands until the other rank has read it. Nothing is sent at all: each rank writes to its own board
and reads those of others. A rank that is late finds a copy: nobody waits for it for long. Ranks
that cannot do this send by gloo: those on other machines, in other containers, or on a system that
forbids it. ``MINIFSDP_COLLECTIVES=gloo`` has all of them do so.

Sources: process_vm_readv(2); Open MPI's "vader" transport and others call it cross memory attach.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from minifsdp.comm.message_tags import Message
from minifsdp.comm.process_memory import copy_memory, read_memory

WANTED = os.environ.get("MINIFSDP_COLLECTIVES") != "gloo"
_LENT, _ADDRESSES, _NBYTES, _READ = range(4)  # the numbers of a line
_LINE = 4 * 8  # bytes
_LINES = 1 << 17  # for each unit and kind (Message.line); untouched lines take no memory
_PAUSE, _LONGEST = 5e-5, 1e-3  # seconds between looks at a board: a tenth of what has passed
_LONG = 0.01  # seconds to wait until a neighbor reads what it has been lent

Places = Callable[[], Sequence[Tensor]]
bytes_lent = 0
"""What other ranks have got of this one in this way."""


class Board:
    """This rank's board for one other rank."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _LINE * (_LINES + 1), mmap.MAP_PRIVATE)
        self._numbers = memoryview(memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.closed = False
        _boards.append(self)

    def write(self, line: int, place: int, number: int) -> None:
        """Write one number of a line."""
        self._numbers[4 * line + place] = number

    def close(self) -> None:
        """Tell the other rank that there will be nothing more: in a line after all others."""
        self.write(_LINES, _LENT, 1)
        self.closed = True


# None is unmapped: other ranks may look at it for as long as this process lives.
_boards: list[Board] = []


class Neighbor:
    """Another rank of a group, on this machine.

    Args:
        rank: its number in the group.
        process: its process id.
        address: of its board for this rank.
        board: this rank's board for it.
    """

    def __init__(self, rank: int, process: int, address: int, board: Board) -> None:
        self.rank, self.process, self.address, self.board = rank, process, address, board
        self.loans: dict[int, Loan] = {}  # by line; those that it may not have read yet
        self._line = (ctypes.c_int64 * 4)()

    def loan_before(self, message: Message) -> "Loan | None":
        """What still stands in the line of a message that is to be lent: the same unit's message
        before it. Wait for it first."""
        for loan in list(self.loans.values()):
            if not loan.is_read():  # else it goes, and lets go what it has kept, perhaps a copy
                break
        return self.loans.get(message.line)

    def line(self, number: int) -> "ctypes.Array[ctypes.c_int64]":
        """What stands in a line of its board for this rank now."""
        read_memory(self.process, self.address + _LINE * number, self._line)
        return self._line

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Look again and again, first at once, for it is usually soon. After that read also what
        else is lent to this rank: the other one may wait for that.

        Raises:
            RuntimeError: it will not come true, since the other rank has ended, has left the group
                or waits elsewhere.
        """
        if condition():
            return
        store: Any = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + store.timeout.total_seconds()  # init_process_group has set it
        pause = _PAUSE
        while not condition():
            # Not os.sched_yield(), which sends this rank to the end of the queue: beside other
            # programs on the same cores, steps took nearly twice as long.
            time.sleep(pause)
            pause = min(1.1 * pause, _LONGEST)
            for fetch in list(_unread):
                with suppress(RuntimeError):  # that is for whoever waits for it
                    fetch.read_if_lent()
            # deadlock_watch.py closes the board if the other rank waits elsewhere.
            if self.board.closed or (self.line(_LINES)[_LENT] and not condition()):
                raise RuntimeError(f"this rank or rank {self.rank} of the group has left it")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.rank} of the group did not come in time")


class Loan:
    """Tensors of this rank that a neighbor is to read, as a message.

    Args:
        tensors: contiguous. They are kept alive, and must not change, until they are read.

    Attributes:
        is_copy: a copy is lent in their place, so they may change.
    """

    def __init__(self, neighbor: Neighbor, tensors: Sequence[Tensor], message: Message) -> None:
        global bytes_lent
        nbytes = sum(tensor.nbytes for tensor in tensors)
        bytes_lent += nbytes
        self.neighbor, self.message, self.is_copy = neighbor, message, False
        self.line, self.serial = message.line, message.serial
        assert self.line not in neighbor.loans, message
        self._show(tensors)
        neighbor.board.write(self.line, _NBYTES, nbytes)
        neighbor.board.write(self.line, _LENT, self.serial)  # last: from now on it is read
        neighbor.loans[self.line] = self

    def is_read(self) -> bool:
        """Whether the neighbor has read it, or never will, since it has ended."""
        loans = self.neighbor.loans
        if loans.get(self.line) is not self:
            return True
        try:
            if self.neighbor.line(self.line)[_READ] != self.serial:
                return False
        except RuntimeError:
            pass  # who needs something of it will hear of that
        loans.pop(self.line, None)  # deadlock_watch.py's thread may have taken out all of them
        return True

    def wait(self) -> None:
        """Wait until the memory may change or be freed: until the neighbor has read it or, if that
        takes long, until there is a copy for it. It may be in a call that reads nothing."""
        start = time.monotonic()
        while not self.is_read() and not self.is_copy:
            if time.monotonic() > start + _LONG:
                self._leave_a_copy()
            else:
                time.sleep(_PAUSE)

    def wait_until_read(self) -> None:
        """Wait until the next message may be written to the same line."""
        self.neighbor.wait_until(self.is_read)

    def _leave_a_copy(self) -> None:
        _before = self.tensors, self._addresses  # kept until this function returns
        self._show([tensor.clone() for tensor in self.tensors])
        # Who has begun to read before that reads what was there before; it is soon done.
        while not self.is_read() and self.neighbor.line(self.line)[_READ] == -self.serial:
            time.sleep(_PAUSE)
        self.is_copy = True

    def _show(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        addresses = (tensor.data_ptr() for tensor in tensors)
        self._addresses = (ctypes.c_int64 * len(tensors))(*addresses)
        self.neighbor.board.write(self.line, _ADDRESSES, ctypes.addressof(self._addresses))


class Fetch:
    """A message that a neighbor lends, and that is read when it is waited for.

    Args:
        places: called when it is read, for the tensors to copy it to: contiguous, and of the sizes
            that the neighbor's have. They need no memory before that.
    """

    def __init__(self, neighbor: Neighbor, places: Places, message: Message) -> None:
        self.neighbor, self.places, self.message = neighbor, places, message
        self.line, self.serial = message.line, message.serial
        self.copied = False
        _unread[self] = None

    def read_if_lent(self) -> bool:
        """Copy it, if it is there and has not been copied. Returns whether it is copied."""
        neighbor = self.neighbor
        if self.copied or neighbor.line(self.line)[_LENT] != self.serial:
            return self.copied
        # Once more: now that the serial number is there, so is what was written before it.
        tensors = self.places()
        lent, nbytes = neighbor.line(self.line)[_NBYTES], sum(t.nbytes for t in tensors)
        if lent != nbytes:
            raise RuntimeError(f"rank {neighbor.rank} has {lent} bytes where {nbytes} are expected")
        # Say so first: from here on the addresses stay as they are, until all is read.
        neighbor.board.write(self.line, _READ, -self.serial)
        start = neighbor.line(self.line)[_ADDRESSES]
        addresses = (ctypes.c_int64 * len(tensors))()
        read_memory(neighbor.process, start, addresses)
        for address, tensor in zip(addresses, tensors, strict=True):
            copy_memory(neighbor.process, address, tensor.data_ptr(), tensor.nbytes)
        neighbor.board.write(self.line, _READ, self.serial)
        _unread.pop(self, None)
        self.copied = True
        return True

    def wait(self) -> None:
        """Wait for the loan, and copy it."""
        self.neighbor.wait_until(self.read_if_lent)

    def drop(self) -> None:
        """Do not read it any more: what it was to be written to may be freed now."""
        _unread.pop(self, None)


# What this rank has begun to fetch, and has not copied; in the order in which it began.
_unread: dict[Fetch, None] = {}
neighbors: "WeakKeyDictionary[dist.ProcessGroup, dict[int, Neighbor]]" = WeakKeyDictionary()
"""The other ranks on this machine, by group and rank; neighbors.py finds them."""


def leave(group: dist.ProcessGroup) -> None:
    """This rank takes no more part in a group. Neighbors that wait for it stop waiting, and it does
    not wait for them."""
    for neighbor in neighbors.get(group, {}).values():
        neighbor.board.close()
        neighbor.loans.clear()
    for fetch in list(_unread):
        if fetch.message.group is group:
            fetch.drop()

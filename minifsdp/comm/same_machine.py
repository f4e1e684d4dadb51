"""Ranks on one machine read each other's memory.

What gloo sends goes through the network code of the system even if both ranks are on one machine:
it is copied in and out, in pieces, by two threads that need the cores on which the ranks compute.
Linux can also copy straight from the memory of another process, at once. So a rank only says where
its data is, and the other one fetches it::

    rank 0, lends                              rank 1, reads

    its board: message 7 is at address a  <--  looks at rank 0's board until message 7 is there
    memory at a                           -->  copies it to its own memory
    looks at its board until              <--  rank 0's board: message 7 is read
    message 7 is read

A *board* (boards.py) is memory of both processes with a line for each unit and kind of message, in
which a loan stands until the other rank has read it. Nothing is sent at all.

**Nobody waits long for a rank that is late.** The late rank finds a copy on the board. Memory that
was lent changes only after it was read, or after a copy was made (:meth:`Loan.wait`). So between
two calls of a model all that a rank has lent is on boards, or was read. A copy can be read for as
long as the reader lives, even if its lender has destroyed its process group, returned or died.

**What is read is what was lent.** A rank may leave a group in the middle of a step, for example
after an exception. Then it withdraws what it lends from its own memory. So the reader looks at the
line again when it has copied. If the line has changed, it may have changed during the copy: the
reader copies from the new place, or raises if the loan was withdrawn.

Ranks that cannot do this send by gloo: those on other machines, in other containers, or on a system
that forbids it. With ``MINIFSDP_COLLECTIVES=gloo`` all ranks send by gloo.

Sources: process_vm_readv(2); Open MPI's "vader" transport and others call it cross memory attach.
To look at the line again is what a reader of a sequence lock does.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from minifsdp.comm.boards import COPY, LENT, NBYTES, READ, WHERE, Board
from minifsdp.comm.message_tags import Message
from minifsdp.comm.process_memory import Unreadable, copy_memory, read_memory

WANTED = os.environ.get("MINIFSDP_COLLECTIVES") != "gloo"
_PAUSE, _LONGEST = 5e-5, 1e-3  # seconds between looks at a board: a tenth of what has passed
_LONG = 0.01  # seconds to wait until a neighbor reads what it has been lent

Places = Callable[[], Sequence[Tensor]]
bytes_lent = 0
"""How many bytes this rank has lent to others."""


class RankLost(RuntimeError):  # noqa: N818  # it says what is the matter
    """A neighbor has ended, has left the group, or does not come."""


class Neighbor:
    """Another rank of a group, on this machine.

    Args:
        rank: its number in the group.
        process: its process id.
        own: this rank's board for it.
        theirs: its board for this rank.
        lives: whether its process is still there.

    Attributes:
        lock: held by the thread that lends, makes a copy, or leaves.
    """

    def __init__(
        self, rank: int, process: int, own: Board, theirs: Board, lives: Callable[[], bool]
    ) -> None:
        self.rank, self.process, self.own, self.theirs = rank, process, own, theirs
        self.loans: dict[int, Loan] = {}  # by line; those that it may not have read yet
        self.lock = threading.Lock()
        self._lives = lives

    def loan_before(self, message: Message) -> "Loan | None":
        """The loan that is still in the line of a message that is to be lent: the message before it
        of the same unit and kind. Wait for it first."""
        for loan in list(self.loans.values()):
            if not loan.is_read():  # else it is taken out, which frees what it kept
                break
        return self.loans.get(message.line)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Check the condition again and again, first at once: usually it is true soon. In between,
        read whatever else is lent to this rank: the other rank may wait for that.

        Raises:
            RankLost: the condition will not come true, since the other rank has ended, has left the
                group, or waits elsewhere.
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
                with suppress(RuntimeError):  # raised again where this fetch is waited for
                    fetch.read_if_lent()
            # Check once more: lending or reading this may be the last thing that rank has done.
            if (gone := self._gone()) and not condition():
                raise RankLost(gone)
            if time.monotonic() > deadline:
                raise RankLost(f"rank {self.rank} of the group did not come in time")

    def _gone(self) -> str:
        """Why nothing more will come, in words; empty if it may."""
        # deadlock_watch.py closes the board if the other rank waits elsewhere.
        if self.own.closed or self.theirs.closed:
            return f"this rank or rank {self.rank} of the group has left it"
        if not self._lives():
            return f"the process {self.process} of rank {self.rank} of the group has ended"
        return ""

    def leave(self) -> None:
        """Withdraw what is lent from this rank's memory, and close the board."""
        with self.lock:
            for loan in self.loans.values():
                if not loan.is_copy:
                    self.own.write(loan.line, LENT, 0)
            self.own.close()
            self.loans.clear()


class Loan:
    """Tensors of this rank that a neighbor is to read, as a message.

    Args:
        tensors: contiguous. They are kept alive, and must not change, until they are read.

    Attributes:
        is_copy: a copy is lent in their place, so they may change.

    Raises:
        RankLost: this rank has left the group.
    """

    def __init__(self, neighbor: Neighbor, tensors: Sequence[Tensor], message: Message) -> None:
        global bytes_lent
        nbytes = sum(tensor.nbytes for tensor in tensors)
        bytes_lent += nbytes
        self.neighbor, self.message, self.is_copy = neighbor, message, False
        self.line, self.serial = message.line, message.serial
        assert self.line not in neighbor.loans, message
        self.tensors = tensors
        addresses = (tensor.data_ptr() for tensor in tensors)
        self._addresses = (ctypes.c_int64 * len(tensors))(*addresses)
        board = neighbor.own
        with neighbor.lock:
            if board.closed:
                raise RankLost("this rank has left the group")
            board.write(self.line, WHERE, ctypes.addressof(self._addresses))
            board.write(self.line, NBYTES, nbytes)
            board.write(self.line, LENT, self.serial)  # last: from now on it is read
            neighbor.loans[self.line] = self

    def is_read(self) -> bool:
        """Whether the neighbor has read it, or never will because this rank has left the group."""
        loans = self.neighbor.loans
        if loans.get(self.line) is not self:
            return True
        if self.neighbor.own.read(self.line, READ) != self.serial:
            return False
        loans.pop(self.line, None)  # deadlock_watch.py's thread may have taken out all of them
        return True

    def wait(self) -> None:
        """Wait until the memory may change or be freed: until the neighbor has read it. If that
        takes long, make a copy for it: the neighbor may be in a call that reads nothing."""
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
        board = self.neighbor.own
        with self.neighbor.lock:
            if self.is_copy or self.is_read():  # another thread has made one, or has left
                return
            board.write_copy(self.line, self.tensors)
            board.write(self.line, WHERE, COPY)  # from now on the memory may change
            self.is_copy = True
            self.tensors = ()


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
        self._lock = threading.Lock()  # a thread that waits reads what any thread has begun
        _unread[self] = None

    def read_if_lent(self) -> bool:
        """Copy it, if it is there and has not been copied. Returns whether it is copied.

        Raises:
            RankLost: it was withdrawn meanwhile, or the neighbor's process has ended.
            RuntimeError: its size is not the expected one.
        """
        if self.copied or self.neighbor.theirs.read(self.line, LENT) != self.serial:
            return self.copied
        if self._lock.acquire(blocking=False):
            try:
                if self in _unread:
                    self._read()
            finally:
                self._lock.release()
        return self.copied

    def _read(self) -> None:
        board, tensors, rank = self.neighbor.theirs, self.places(), self.neighbor.rank
        lent, nbytes = board.read(self.line, NBYTES), sum(t.nbytes for t in tensors)
        if lent != nbytes:
            raise RuntimeError(
                f"{self.message}: rank {rank} of the group has {lent} bytes where {nbytes} are "
                f"expected. All ranks have to run the same units, in the same dtypes."
            )
        before = None
        while before != (before := board.read(self.line, WHERE)):
            try:
                self._copy(before, tensors)
            except Unreadable as error:  # for example because it was freed when there was a copy
                if board.read(self.line, WHERE) == before:
                    raise RankLost(str(error)) from error
            # If the line still says so, the loan was there all the time: what was copied is right.
            if board.read(self.line, LENT) != self.serial:
                raise RankLost(f"rank {rank} of the group has left it while its memory was read")
        if before == COPY:
            board.free_copy(self.line)
        board.write(self.line, READ, self.serial)
        _unread.pop(self, None)
        self.copied = True

    def _copy(self, where: int, tensors: Sequence[Tensor]) -> None:
        if where == COPY:
            self.neighbor.theirs.read_copy(self.line, tensors)
            return
        process, addresses = self.neighbor.process, (ctypes.c_int64 * len(tensors))()
        read_memory(process, where, addresses)
        for address, tensor in zip(addresses, tensors, strict=True):
            copy_memory(process, address, tensor.data_ptr(), tensor.nbytes)

    def wait(self) -> None:
        """Wait for the loan, and copy it."""
        self.neighbor.wait_until(self.read_if_lent)

    def drop(self) -> None:
        """Do not read it any more: what it was to be written to may be freed now."""
        with self._lock:  # not while another thread reads it
            _unread.pop(self, None)


# What this rank has begun to fetch, and has not copied; in the order in which it began.
_unread: dict[Fetch, None] = {}
neighbors: "WeakKeyDictionary[dist.ProcessGroup, dict[int, Neighbor]]" = WeakKeyDictionary()
"""The other ranks on this machine, by group and rank; neighbors.py finds them."""


def leave(group: dist.ProcessGroup) -> None:
    """This rank takes no more part in a group. Neighbors stop waiting for it, and it for them. The
    copies on its boards can still be read."""
    for neighbor in neighbors.pop(group, {}).values():
        neighbor.leave()
    for fetch in list(_unread):
        if fetch.message.group is group:
            fetch.drop()

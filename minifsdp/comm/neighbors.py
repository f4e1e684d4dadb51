"""Which ranks of a group are on this machine, and can read each other's memory.

Names of machines and numbers of processes prove nothing: in another container the same number is
another process. So each rank writes a random number to its memory, and the others try to read it::

    rank 0   process 40, address a, number x        rank 1 reads x there?  yes: on one machine
                                                    rank 2 finds no process 40, or not x

The number stays there. A rank that waits for another one tries to read it again, and knows by that
whether the process still lives.
"""

import ctypes
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import torch

from minifsdp.comm import same_machine
from minifsdp.comm.boards import Board
from minifsdp.comm.collectives import all_gather
from minifsdp.comm.message_tags import Kind
from minifsdp.comm.process_memory import POSSIBLE, Unreadable, read_memory
from minifsdp.comm.same_machine import Neighbor
from minifsdp.core.collectives import Group

_numbers: list[object] = []  # kept: other ranks look at them for as long as this process lives


def find_neighbors(group: Group) -> None:
    """From now on, ranks of ``group`` that are on one machine read each other's memory. All ranks
    of the group have to call this. Does nothing after the first call, or if gloo is asked for."""
    if group in same_machine.neighbors or not same_machine.WANTED:
        return
    same_machine.neighbors[group] = {}
    _allow_siblings()
    number = (ctypes.c_int64 * 1)(secrets.randbits(62))
    _numbers.append(number)
    others = _gather(group, [os.getpid(), ctypes.addressof(number), number[0]])
    lives = {
        rank: partial(_reads, *other) for rank, other in enumerate(others) if rank != group.rank()
    }
    near = [rank for rank in lives if POSSIBLE and lives[rank]()]
    own = _boards(near, lambda rank: Board.new(number[0]))
    mine = [own[rank].file if rank in own else -1 for rank in range(group.size())]
    files = [row[group.rank()] for row in _gather(group, mine)]
    theirs = _boards(own, lambda rank: Board.of(others[rank][0], files[rank], others[rank][2]))
    # Two ranks are neighbors only if each of them could do all of this.
    found = _gather(group, [int(rank in theirs) for rank in range(group.size())])
    same_machine.neighbors[group] = {
        rank: Neighbor(rank, others[rank][0], own[rank], theirs[rank], lives[rank])
        for rank in theirs
        if found[rank][group.rank()]
    }


def _boards(ranks: Iterable[int], make: Callable[[int], Board]) -> dict[int, Board]:
    """A board for each of the ranks for which the system allows it."""
    made = {}
    for rank in ranks:
        with suppress(OSError, ValueError):
            made[rank] = make(rank)
    return made


def _gather(group: Group, numbers: list[int]) -> list[list[int]]:
    mine = torch.tensor(numbers, device="cpu")  # whatever the program has made the default device
    found = mine.new_empty(group.size() * len(mine))
    all_gather(found, mine, group, 0, "the search for ranks on one machine", Kind.OTHER)()
    rows: list[list[int]] = found.view(group.size(), -1).tolist()
    return rows


def _reads(process: int, address: int, expected: int) -> bool:
    found = (ctypes.c_int64 * 1)()
    try:
        read_memory(process, address, found)
    except Unreadable:
        return False
    return found[0] == expected


def _allow_siblings() -> None:
    """Where Linux has Yama, as on Ubuntu, a process may read only the memory of its children,
    unless the process that is read allows more. This one allows all that its parent has started."""
    if POSSIBLE:
        set_ptracer = 0x59616D61
        ctypes.CDLL(None).prctl(set_ptracer, ctypes.c_ulong(os.getppid()), 0, 0, 0)

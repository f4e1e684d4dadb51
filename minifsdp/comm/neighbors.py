"""Which ranks of a group are on this machine, and can read each other's memory.

Names of machines and numbers of processes prove nothing: in another container the same number is
another process. So each rank writes a random number to its memory, and the others try to read it::

    rank 0   process 40, address a, number x        rank 1 reads x there?  yes: on one machine
                                                    rank 2 finds no process 40, or not x
"""

import ctypes
import os
import secrets

import torch

from minifsdp.comm import same_machine
from minifsdp.comm.collectives import Group, all_gather
from minifsdp.comm.message_tags import Kind
from minifsdp.comm.process_memory import POSSIBLE, read_memory
from minifsdp.comm.same_machine import Board, Neighbor


def find_neighbors(group: Group) -> None:
    """From now on, ranks of ``group`` that are on one machine read each other's memory. All of its
    ranks have to call this. Nothing, if they have done so before, or if gloo is asked for."""
    if group in same_machine.neighbors or not same_machine.WANTED:
        return
    same_machine.neighbors[group] = {}
    _allow_siblings()
    # It has to live until all have tried, which they have when the second gather is complete.
    number = (ctypes.c_int64 * 1)(secrets.randbits(62))
    others = _gather(group, [os.getpid(), ctypes.addressof(number), number[0]])
    boards = {
        rank: Board()
        for rank, (process, address, expected) in enumerate(others)
        if rank != group.rank() and POSSIBLE and _reads(process, address, expected)
    }
    mine = [boards[rank].address if rank in boards else 0 for rank in range(group.size())]
    theirs = [row[group.rank()] for row in _gather(group, mine)]
    same_machine.neighbors[group] = {
        rank: Neighbor(rank, others[rank][0], theirs[rank], board)
        for rank, board in boards.items()
        if theirs[rank]  # else only one of the two could read
    }


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
    except RuntimeError:
        return False
    return found[0] == expected


def _allow_siblings() -> None:
    """Where Linux has Yama, as on Ubuntu, a process may read the memory of its children only,
    unless that one allows it. This one allows those that its parent has started."""
    if POSSIBLE:
        set_ptracer = 0x59616D61
        ctypes.CDLL(None).prctl(set_ptracer, ctypes.c_ulong(os.getppid()), 0, 0, 0)

"""Ranks that read each other's memory, for the tests of what they do."""

import ctypes
import os
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives, same_machine
from minifsdp.comm.collectives import all_gather, all_reduce, reduce_scatter
from minifsdp.comm.neighbors import find_neighbors
from minifsdp.comm.process_memory import POSSIBLE, read_memory
from tests.patience import Patience


def forbidden() -> bool:
    """Whether the system call is filtered, as in some containers. A process may read itself."""
    number = (ctypes.c_int64 * 1)(7)
    try:
        read_memory(os.getpid(), ctypes.addressof(number), (ctypes.c_int64 * 1)())
    except RuntimeError:
        return True
    return False


NEEDED = [
    pytest.mark.skipif(not POSSIBLE, reason="memory is read on Linux and x86-64 only"),
    pytest.mark.skipif(POSSIBLE and forbidden(), reason="memory may not be read on this system"),
    pytest.mark.skipif(collectives.NATIVE, reason="torch's own collectives were asked for"),
]


def near() -> dist.ProcessGroup:
    """A new group of all ranks, who read each other's memory."""
    group = dist.new_group()
    with patch.object(same_machine, "WANTED", True):
        find_neighbors(group)
    return group


def mine(numel: int, dtype=torch.float32, of: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if of is None else of)
    return torch.randn(numel, generator=generator).to(dtype)


def check_all(group: dist.ProcessGroup, numel: int = 6, dtype=torch.float32) -> None:
    """The same as gloo gives, bit for bit."""
    world = group.size()
    for chunk in (mine(numel, dtype), torch.randint(9, (numel,))):
        full, expected = (chunk.new_zeros(world * numel) for _ in range(2))
        all_gather(full, chunk, group, 7)()
        all_gather(expected, chunk, dist.new_group(), 7)()
        assert torch.equal(full, expected)
    flat = mine(world * numel, dtype)
    found = []
    for on in (group, dist.new_group()):
        total, finish = reduce_scatter(flat.clone(), on, 1 / world, 7)
        finish()
        whole = flat.clone()
        for finish in all_reduce(whole, on, 1 / world, 7):
            finish()
        found.append(torch.cat([total, whole]))
    assert torch.equal(*found)


def at(key: str) -> bool:
    return dist.distributed_c10d._get_default_store().check([key])


def say(key: str) -> None:
    dist.distributed_c10d._get_default_store().set(key, "")


def wait_until_said(key: str) -> None:
    patience = Patience(30)
    while not at(key):
        assert patience.left, key
        time.sleep(0.001)

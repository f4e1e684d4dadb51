"""freed_memory.py: pages of freed memory are not brought anew, unless the user wants it so."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from minifsdp.chunks.layout import FeaturedChunks
from minifsdp.support import freed_memory, unsharded_storage
from tests.lone_unit import lone_unit
from tests.patience import run_command

CODE = """
import gc, resource, torch
from minifsdp.support.freed_memory import keep_freed_memory

class Owner: pass

def pages():
    "That the system brings for two pieces of 40 MB, which are allocated, written and freed."
    for _ in range(12):  # only the last time counts: first each finds its place
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pieces = [torch.ones(10_000_000) for _ in range(2)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

found, owners = [pages()], []
for nbytes in (30_000_000, 60_000_000):
    owners.append(Owner())
    keep_freed_memory(owners[-1], nbytes)
    found.append(pages())
print(*(count > 5_000 for count in found))
"""


def pages_come_anew(**variables):
    given = {name: value for name, value in os.environ.items() if name not in freed_memory._USERS}
    words = [f"{name}={value}" for name, value in (given | variables).items()]
    result = run_command(["env", "-i", *words, sys.executable, "-W", "ignore", "-c", CODE])
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_what_is_freed_is_kept_as_far_as_its_owner_wants_it():
    """Nobody; one of 30 MB; one of 60 MB."""
    assert pages_come_anew() == ["True", "True", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_what_the_user_has_chosen_stays():
    assert pages_come_anew(MALLOC_TRIM_THRESHOLD_="100000") == ["True"] * 3


class Owner:
    pass


@pytest.mark.direct
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_an_owner_that_is_gone_does_not_count_and_no_number_is_too_large(monkeypatch):
    calls = {}
    libc = SimpleNamespace(mallopt=calls.__setitem__)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(freed_memory, "_pieces", type(freed_memory._pieces)())
    for name in freed_memory._USERS:
        monkeypatch.delenv(name, raising=False)
    kept = lambda: (calls[-3] >> 20, calls[-1] >> 20)  # noqa: E731  (M_MMAP_THRESHOLD, M_TRIM_...)
    first, second, third = (Owner() for _ in range(3))
    freed_memory.keep_freed_memory(first, 9 << 20)
    assert kept() == (10, 20)
    freed_memory.keep_freed_memory(second, 4 << 20)
    assert kept() == (10, 30)
    del first
    freed_memory.keep_freed_memory(third, 1 << 20)
    assert kept() == (5, 14)
    freed_memory.keep_freed_memory(third, 10 << 30)
    assert calls == {-3: 2**31 - 1, -1: 2**31 - 1}


@pytest.mark.direct
def test_a_unit_whose_memory_comes_and_goes_is_an_owner(monkeypatch):
    owners = {}
    monkeypatch.setattr(unsharded_storage, "keep_freed_memory", owners.__setitem__)
    with lone_unit() as lone:
        lone.unit.compute_in(torch.float64)
        found, expected = owners.get(lone.unit.unsharded), lone.unit.unsharded.nbytes
        assert found == expected > 0


@pytest.mark.direct
@pytest.mark.parametrize("needs_unshard", [True, False])
def test_gradients_come_and_go_where_nothing_is_sharded_too(needs_unshard, monkeypatch):
    owners = {}
    monkeypatch.setattr(unsharded_storage, "keep_freed_memory", owners.__setitem__)
    made = unsharded_storage.UnshardedFlatParams(lambda *_: None).add(
        torch.ones(6), True, needs_unshard, FeaturedChunks([torch.Size([6])], 1)
    )
    assert owners == {made: 24}

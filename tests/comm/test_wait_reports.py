"""wait_reports.py: which ranks are in a deadlock, as far as it can be proved."""

import sys
import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm.message_tags import Kind, Message, owners
from minifsdp.comm.wait_reports import (
    Awaited,
    WaitReport,
    all_waits,
    called_from,
    deadlocked,
    torch_collective,
)
from tests.ranks import on_ranks

A, B, C = (("group", unit, 0, 4) for unit in range(3))


def waits(awaited, ranks=(0, 1), **started) -> WaitReport:
    """A report of a rank that has started so many messages of each kind."""
    counts = {"a": A, "b": B, "c": C}
    counts = {counts[name]: n for name, n in started.items()}
    return WaitReport((Awaited("", ranks, awaited),), counts, 0)


def two_threads(first: WaitReport, second: WaitReport) -> WaitReport:
    return WaitReport(first.awaited + second.awaited, {**first.started, **second.started}, 0)


FOUND = {  # reports by rank, and the ranks in a deadlock
    "each waits for the other": ({0: waits((A, 2), a=2, b=1), 1: waits((B, 2), a=1, b=2)}, {0, 1}),
    "what one waits for is on its way": (
        {0: waits((A, 2), a=2, b=1), 1: waits((B, 2), a=2, b=2)},
        set(),
    ),
    "both wait for the same": ({0: waits((A, 2), a=2), 1: waits((A, 2), a=2)}, set()),
    "the other one does not wait": ({0: waits((A, 2), a=2)}, set()),
    "one has never heard of it": ({0: waits((A, 1), a=1), 1: waits((B, 1), b=1)}, {0, 1}),
    "three in a cycle, of which one can go on": (
        {
            0: waits((A, 1), (0, 1), a=1, c=1),
            1: waits((B, 1), (1, 2), b=1, a=0),
            2: waits((C, 1), (2, 0), c=1),
            3: waits((A, 5), (3, 4), a=5),
        },
        set(),
    ),
    "three in a cycle, each waiting for the next": (
        {
            0: waits((A, 1), (0, 1), a=1),
            1: waits((B, 1), (1, 2), b=1),
            2: waits((C, 1), (2, 0), c=1),
            3: waits((A, 5), (3, 4), a=5),
        },
        {0, 1, 2},
    ),
    "and one that waits for them": (
        {
            0: waits((A, 1), a=1),
            1: waits((B, 1), b=1),
            2: waits((C, 1), (1, 2), c=1),
        },
        {0, 1, 2},
    ),
    "one in torch's own": ({0: waits(None, a=1), 1: waits((A, 2), a=2)}, {0, 1}),
    "both in torch's own": ({0: waits(None, a=1), 1: waits(None, a=2)}, set()),
    "in torch's own, after it has sent": ({0: waits(None, a=2), 1: waits((A, 2), a=2)}, set()),
    "of two threads one can go on": (
        {0: two_threads(waits((A, 2), a=2), waits((C, 1), c=1)), 1: waits((B, 2), a=1, b=2, c=1)},
        set(),
    ),
    "two threads, each in vain": (
        {
            0: two_threads(waits((A, 2), a=2, b=1), waits((C, 1), c=1)),
            1: two_threads(waits((B, 2), a=1, b=2), waits(None)),
        },
        {0, 1},
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_which_ranks_are_in_a_deadlock(case):
    reports, expected = FOUND[case]
    assert deadlocked(reports) == expected


@on_ranks(3)
def test_torchs_own_collectives_are_seen_from_another_thread():
    """Rank 0 is in a barrier of two ranks until its other thread has seen that."""
    store, seen = dist.distributed_c10d._get_default_store(), []
    group = dist.new_group([0, 1])
    main = threading.get_ident()
    assert torch_collective(sys._getframe()) is None
    if dist.get_rank() == 2:
        return
    if dist.get_rank():
        store.wait(["rank 0 was seen"])
        store.delete_key("rank 0 was seen")
        dist.barrier(group)
        return

    def look() -> None:
        while not seen:
            found = torch_collective(sys._current_frames()[main])
            if found is not None and found.name == "barrier":
                seen.append(found)
        store.set("rank 0 was seen", "yes")

    thread = threading.Thread(target=look)
    thread.start()
    dist.barrier(group)
    thread.join()
    assert seen[0].ranks == (0, 1)


@on_ranks(1)
def test_other_functions_of_that_name_are_the_users_own():
    def barrier() -> object:
        return torch_collective(sys._getframe())

    assert barrier() is None


@on_ranks(1)
def test_other_functions_of_that_name_are_no_collectives_of_torchs_either():
    found = []

    class Outputs:
        def __getitem__(self, place):
            found.append(sys._getframe(1))
            raise KeyError

    with pytest.raises(KeyError):
        torch.nn.parallel.gather(Outputs(), "cpu")
    assert found[0].f_back.f_code.co_name == "gather"
    assert torch_collective(found[0]) is None


@on_ranks(1)
def test_a_rank_waits_if_all_its_threads_do_that_run_a_model():
    main, messages, go_on = threading.get_ident(), {}, threading.Event()

    def other() -> None:
        messages[threading.get_ident()] = message()
        go_on.wait(30)

    def message() -> Message:
        return Message(dist.new_group(), 5, Kind.OTHER, 4, "")

    with patch.dict(owners, clear=True):
        assert all_waits({}) == {}
        messages[main] = message()
        thread = threading.Thread(target=other)
        thread.start()
        while len(messages) < 2:
            time.sleep(0.001)
        assert all_waits(messages) == messages
        assert all_waits({main: messages[main]}) == {}  # the other one may be computing
        go_on.set()
        thread.join()
        assert all_waits(messages) == {main: messages[main]}


def test_where_is_the_users_line():
    found = []
    with patch.object(torch.nn.Module, "forward", lambda self: found.append(sys._getframe(1))):
        torch.nn.Module()()
    assert found[0].f_code.co_filename.endswith("module.py")
    assert called_from(found[0]).startswith(", called from test_wait_reports.py:")
    assert called_from(None) == ""

"""deadlock_watch.py: all ranks of a deadlock raise. (More: promises/test_ranks_agree.py.)"""

import re
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import collectives, deadlock_watch
from minifsdp.comm.message_tags import Kind, Message
from tests.ranks import World


def alone_in_the_world(function, *args, ranks=2):
    world = World(ranks)
    try:
        return world.call(function, args, {}, 60)
    finally:
        world.kill()


def crossed(kind):
    """Each rank waits for a gather that the other has not started. Returns what it raises."""
    group = dist.new_group()
    deadlock_watch.watch([group])
    chunk, full = torch.ones(4), torch.empty(4 * dist.get_world_size())
    rank = dist.get_rank()
    with (
        patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
        pytest.raises(RuntimeError) as error,
    ):
        if rank and kind == "all-reduce":
            next(collectives.all_reduce(chunk, group, 1.0, 5, "'b'"))()
        else:
            collectives.all_gather(
                full, chunk, group, 5 + dist.get_rank(), f"'{dist.get_rank()}'"
            )()
    assert not deadlock_watch.waiting
    dist.barrier()  # another group is as it was
    return str(error.value)


@pytest.mark.parametrize("kind", ["gather", "all-reduce"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_say_the_same(kind, ranks):
    said = alone_in_the_world(crossed, kind, ranks=ranks)
    for text in said:
        assert "have parted ways" in text
        places = re.findall(r"rank (\d): in the .*?, called from test_deadlock_watch.py:\d+", text)
        assert len(set(places)) >= 2  # one that had no time to say so may be missing


def told():
    """Rank 1 shares a group with each of the others. Rank 2 comes when they have parted already."""
    rank, store = dist.get_rank(), deadlock_watch._store()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    deadlock_watch.watch([[first], [first, second], [second]][rank])
    group, chunk, full = second if rank == 2 else first, torch.ones(4), torch.empty(8)
    if rank == 2:
        store.wait(["parted"])
    finds = deadlock_watch._LongWait.check if rank != 1 else lambda self: None
    with (
        patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
        patch.object(deadlock_watch._LongWait, "check", finds),
        pytest.raises(RuntimeError) as error,
    ):
        collectives.all_gather(full, chunk, group, 5 + rank, "'a'")()
    store.set("told" if rank == 2 else "parted", "")
    store.wait(["told"])  # each process lives till then, and waits in nothing that is watched
    return str(error.value)


def test_who_shares_a_group_with_one_that_was_told_is_told():
    for said in alone_in_the_world(told, ranks=3):
        assert "have parted ways" in said


def late():
    """The answer to whether a barrier is still waited in comes from now, not from the past."""
    group = dist.new_group()
    deadlock_watch.watch([group])
    chunk, full, rank = torch.ones(4), torch.empty(8), dist.get_rank()
    with patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2):
        for _ in range(2):
            if rank:
                threading.Event().wait(1)
            dist.barrier(group)  # rank 0 is reported here,
            if not rank:
                threading.Event().wait(1)
            collectives.all_gather(full, chunk, group, 5)()  # and rank 1 reads that here
    return full.tolist()


def test_a_report_that_is_over_is_not_believed():
    assert alone_in_the_world(late) == [[1.0] * 8] * 2


def destroyed():
    chunk, full = torch.ones(4), torch.empty(8)
    group = dist.group.WORLD
    deadlock_watch.watch([group])
    with patch.multiple(deadlock_watch, POLL=0.05):
        if dist.get_rank() == 0:
            dist.destroy_process_group()
            return ""
        with pytest.raises(RuntimeError) as error:
            collectives.all_gather(full, chunk, group, 5, "'a'")()
    return str(error.value)


def test_a_rank_that_has_destroyed_its_groups_closes_them():
    _, said = alone_in_the_world(destroyed)
    assert "rank 1 waited in the gather of the parameters of unit 'a'" in said
    assert "lost the other ranks" in said and "same number of batches" in said


def left():
    """Nobody waits for a message any more, since an exception has ended the forward."""
    group = dist.new_group()
    message = Message(group, 5, Kind.PARAMETERS, 4, "'a'")
    with patch.multiple(deadlock_watch, POLL=1e9):  # the thread does nothing
        deadlock_watch.watch([group])
        deadlock_watch.unfinished[message] = []
        deadlock_watch._close_destroyed()
        kept = message in deadlock_watch.unfinished
        dist.barrier()
        dist.destroy_process_group(group)
        deadlock_watch._close_destroyed()
    dist.barrier()
    return kept, message in deadlock_watch.unfinished


def test_what_nobody_waits_for_is_kept_as_long_as_its_group():
    assert alone_in_the_world(left) == [(True, False)] * 2


def in_vain_or_over():
    """Both ranks wait for a gather that the other has not started, or seem to."""
    rank, group = dist.get_rank(), dist.group.WORLD
    message = Message(group, 5 + rank, Kind.PARAMETERS, 4, "'a'")
    key = f"minifsdp/watch/{rank}"
    waits = {threading.get_ident(): message}
    assert deadlock_watch._LongWait(waits).report is None  # it is over
    assert not deadlock_watch._store().check([key])
    ended = []
    with (
        patch.object(deadlock_watch, "waiting", waits),
        patch.object(deadlock_watch, "_end_wait", lambda *_: ended.append(True)),
    ):
        wait = deadlock_watch._LongWait(waits)
        dist.barrier()
        wait.check()
        assert not ended  # the other one may not have seen it yet
        with patch.object(deadlock_watch, "waiting", {}):
            wait.check()
        assert not ended
        wait.check()
    dist.barrier()
    return len(ended)


def test_a_wait_is_ended_when_it_was_seen_in_vain_twice_and_is_not_over():
    assert alone_in_the_world(in_vain_or_over) == [1, 1]


def one_thread():
    for _ in range(3):
        deadlock_watch.watch([dist.group.WORLD])
    names = [thread.name for thread in threading.enumerate()]
    message = Message(dist.group.WORLD, 5, Kind.REDUCTION, 4, "'a'")
    return names.count("minifsdp-watch"), str(
        deadlock_watch.explain_wait(message, RuntimeError("too late"))
    )


def test_there_is_one_thread_and_without_a_verdict_the_error_itself_is_told():
    for rank, (threads, said) in enumerate(alone_in_the_world(one_thread)):
        assert threads == 1
        assert f"rank {rank} waited in the reduction of the gradient of unit 'a'" in said
        assert "too late" in said


def cut_off():
    """The store does not answer, as if the cable to its machine were cut."""
    mended = threading.Event()
    silent = SimpleNamespace(check=lambda keys: mended.wait())
    message = Message(dist.group.WORLD, 5, Kind.REDUCTION, 4, "'a'")
    with (
        patch.object(deadlock_watch, "_store", lambda: silent),
        patch.object(deadlock_watch, "STORE_ANSWERS", 0.2),
    ):
        said = str(deadlock_watch.explain_wait(message, RuntimeError("too late")))
    mended.set()
    return said


def test_a_rank_that_is_cut_off_says_what_it_waited_for():
    (said,) = alone_in_the_world(cut_off, ranks=1)
    assert "waited in the reduction of the gradient of unit 'a'" in said and "too late" in said

"""same_machine.py: loans, and what becomes of them if a rank does not come."""

import ctypes
import gc
import mmap
import os
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import deadlock_watch, same_machine
from minifsdp.comm.collectives import all_gather, reduce_scatter
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.comm.neighbors import _reads
from minifsdp.comm.transport import wait_for, wait_for_readers
from tests.comm.near import NEEDED, mine, near, say, wait_until_said
from tests.comm.test_deadlock_watch import alone_in_the_world
from tests.ranks import on_ranks

pytestmark = NEEDED


@on_ranks(2)
def test_a_line_is_free_again_when_its_last_message_is_read():
    """Rank 0 lends three times before rank 1 reads once. It waits, and loses nothing."""
    group, finishes, fulls = near(), [], [torch.empty(2) for _ in range(3)]
    if dist.get_rank() == 1:
        wait_until_said("rank 0 is about to lend again")
        time.sleep(0.02)
    for number, full in enumerate(fulls):
        if dist.get_rank() == 0 and number == 1:
            say("rank 0 is about to lend again")
        chunk = torch.tensor([10.0 * dist.get_rank() + number])
        finish = all_gather(full, chunk, group, 7)
        if dist.get_rank() == 1:
            finish()
        finishes.append(finish)
    for finish in finishes if dist.get_rank() == 0 else ():
        finish()
    wait_for_readers()
    assert [full.tolist() for full in fulls] == [[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]]


@on_ranks(2)
def test_units_whose_tags_are_alike_are_not_mixed_up():
    """A tag holds 14 bits of a unit's number. These two are the same in it, and take turns in one
    line, each with the same count of messages before it."""
    group = near()
    for count in range(3):
        for unit in (5, 5 + (1 << 14)):
            full, chunk = torch.empty(2), torch.tensor([float(unit + count + dist.get_rank())])
            all_gather(full, chunk, group, unit)()
            assert full.tolist() == [unit + count, unit + count + 1.0]
    wait_for_readers()


@on_ranks(2)
def test_a_message_of_another_size_is_refused():
    """gloo would end the process. Without this what lies behind the tensor would be read."""
    group = near()
    message = Message(group, 5, Kind.OTHER, 4, "message 5")
    other = same_machine.neighbors[group][1 - dist.get_rank()]
    works = (
        same_machine.Loan(other, [mine(4)], message),
        same_machine.Fetch(other, lambda: [torch.empty(2), torch.empty(3)], message),
    )
    words = r"^message 5: rank \d of the group has 16 bytes where 20 are expected"
    with pytest.raises(RuntimeError, match=words):
        wait_for(works, message)()
    dist.barrier()
    same_machine.leave(group)


@on_ranks(3)
def test_a_sum_gets_its_memory_with_the_data():
    """Until then the next unit's parameters can have it."""
    total, finish = reduce_scatter(torch.ones(6), near(), 1.0, 7)
    assert not total.untyped_storage().nbytes()
    finish()
    assert total.tolist() == [3, 3]


@on_ranks(3)
def test_messages_may_be_started_and_finished_in_any_order():
    """A rank that waits reads what else is lent to it: else each would wait to be read."""
    group, fulls, finishes = near(), {}, []
    for tag in (1, 2) if dist.get_rank() == 0 else (2, 1):
        fulls[tag] = torch.empty(12)
        finishes.append(all_gather(fulls[tag], mine(4) + tag, group, tag, kind=Kind.OTHER))
    for finish in finishes:
        finish()
    for tag in (1, 2):
        expected = [mine(4, of=rank) + tag for rank in range(3)]
        assert torch.equal(fulls[tag], torch.cat(expected))


def parted() -> str:
    """Each rank waits for what the other one has not started."""
    group, rank = near(), dist.get_rank()
    deadlock_watch.watch([group])
    neighbor = same_machine.neighbors[group][1 - rank]
    own, later = (Message(group, n + rank, Kind.OTHER, 4, f"message {n + rank}") for n in (6, 8))
    also = wait_for([same_machine.Fetch(neighbor, lambda: [torch.ones(4)], later)], later)
    with (
        patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
        pytest.raises(RuntimeError) as error,
    ):
        wait_for([same_machine.Fetch(neighbor, lambda: [torch.ones(4)], own)], own)()
    with pytest.raises(RuntimeError):
        also()  # as a forward that has failed waits for what it has prefetched
    dist.barrier()  # another group is as it was
    return str(error.value)


def test_ranks_that_part_ways_raise():
    for text in alone_in_the_world(parted):
        assert "have parted ways" in text, text
        assert "rank 0: in message" in text or "rank 1: in message" in text


def left() -> str:
    """Rank 1 has destroyed its process group; it is still there."""
    group = near()
    deadlock_watch.watch([group])
    if dist.get_rank() == 1:
        same_machine.leave(group)
        time.sleep(1)
        return ""
    with pytest.raises(RuntimeError) as error:
        all_gather(torch.empty(8), mine(4), group, 7, "'block'")()
    return str(error.value)


@on_ranks(2)
def test_what_was_lent_in_a_group_that_is_left_holds_up_nobody():
    """A program may make other groups after a failure. Nobody has read this, and nobody will."""
    group, other = near(), near()
    finish = all_gather(torch.empty(2), mine(1), group, 7)
    (neighbor,) = same_machine.neighbors[group].values()
    if dist.get_rank() == 0:
        finish()  # and not on rank 1
    dist.barrier()
    same_machine.leave(group)
    assert not neighbor.loans and group not in same_machine.neighbors
    full = torch.empty(2)
    all_gather(full, mine(1), other, 7)()
    wait_for_readers()
    assert torch.equal(full, torch.cat([mine(1, of=0), mine(1, of=1)]))


@on_ranks(2)
def test_who_has_left_does_not_wait_for_those_who_are_still_there():
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    if dist.get_rank() == 0:
        same_machine.leave(group)
        store = Mock(timeout=timedelta(seconds=5))
        fetch = same_machine.Fetch(
            neighbor, lambda: [mine(1)], Message(group, 5, Kind.OTHER, 4, "")
        )
        with (
            patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
            pytest.raises(RuntimeError, match="this rank or rank 1 of the group has left it"),
        ):
            fetch.wait()
        fetch.drop()
    dist.barrier()


@on_ranks(2)
def test_what_has_failed_is_not_read_later():
    """Its memory may be freed, and in use for something else."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    message = Message(group, 5, Kind.OTHER, 4, "")
    fetches = [same_machine.Fetch(neighbor, lambda: [mine(1)], message) for _ in range(2)]
    with (
        patch.object(same_machine.Fetch, "wait", Mock(side_effect=RuntimeError("lost"))),
        pytest.raises(RuntimeError, match="lost"),
    ):
        wait_for(fetches, message)()
    assert not set(fetches) & set(same_machine._unread)


@on_ranks(2)
def test_who_does_not_come_is_not_waited_for_longer_than_the_process_group_says():
    group, store = near(), Mock(timeout=timedelta(seconds=0.1))
    if dist.get_rank() == 0:
        fetch = same_machine.Fetch(
            same_machine.neighbors[group][1],
            lambda: [mine(1)],
            Message(group, 5, Kind.OTHER, 4, ""),
        )
        with (
            patch.object(dist.distributed_c10d, "_get_default_store", lambda: store),
            pytest.raises(RuntimeError, match="rank 1 of the group did not come in time"),
        ):
            fetch.wait()
    dist.barrier()
    same_machine.leave(group)


@on_ranks(2)
def test_who_has_ended_unread_is_told_when_the_next_message_is_lent():
    """Memory may change all the same: for all that a rank knows it is only late."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    message = Message(group, 5, Kind.OTHER, 4, "message 5")
    loan = same_machine.Loan(neighbor, [mine(1)], message)
    loan.wait()
    assert loan.is_copy and not loan.tensors
    with (
        patch.object(neighbor, "_lives", ended),
        pytest.raises(same_machine.RankLost, match=r"the process \d+ of rank \d of the group has"),
    ):
        loan.wait_until_read()
    dist.barrier()
    same_machine.leave(group)


@on_ranks(2)
def test_loans_may_be_given_up_while_one_of_them_is_looked_at():
    """By the thread of deadlock_watch.py, when it closes the group."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    loan = same_machine.Loan(neighbor, [mine(1)], Message(group, 5, Kind.OTHER, 4, ""))

    def closed_meanwhile(*_: int) -> int:
        same_machine.leave(group)
        return loan.serial

    with patch.object(neighbor.own, "read", closed_meanwhile):
        assert loan.is_read()
    dist.barrier()


def test_a_rank_that_has_left_is_not_waited_for():
    text, _ = alone_in_the_world(left)
    assert "in the gather of the parameters of unit 'block'" in text
    assert "rank 1 of the group has left it" in text


def ended() -> bool:
    """Whether a process lives that has ended."""
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return _reads(process, 8, 0)


def without_rank_1() -> str:
    """Rank 1 does not take part; for rank 0 it is a process that has ended."""
    group = near()
    if dist.get_rank() == 1:
        return ""
    with (
        patch.object(same_machine.neighbors[group][1], "_lives", ended),
        pytest.raises(RuntimeError) as error,
    ):
        all_gather(torch.empty(8), mine(4), group, 7, "'block'")()
    return str(error.value)


def test_a_rank_that_has_ended_is_not_waited_for():
    text, _ = alone_in_the_world(without_rank_1)
    assert "rank 0 waited in the gather of the parameters of unit 'block'" in text
    assert "lost the other ranks" in text and "of rank 1 of the group has ended" in text


# ------------------------------------------------------------- whose number it is that a rank reads


def lend(tensor: torch.Tensor) -> tuple[same_machine.Loan, same_machine.Fetch, torch.Tensor]:
    """Both ranks lend something, and fetch what the other one lends, to the third."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    message, found = Message(group, 5, Kind.OTHER, 4, "message 5"), torch.zeros_like(tensor)
    loan = same_machine.Loan(neighbor, [tensor], message)
    dist.barrier()
    return loan, same_machine.Fetch(neighbor, lambda: [found], message), found


@contextmanager
def slowly(meanwhile):
    """Rank 1 has copied half when rank 0 does something."""
    copy = same_machine.copy_memory

    def slow(process: int, address: int, into: int, nbytes: int) -> None:
        copy(process, address, into, nbytes // 2)
        say("rank 1 reads")
        wait_until_said("rank 0 has gone on")
        copy(process, address + nbytes // 2, into + nbytes // 2, nbytes - nbytes // 2)

    with patch.object(same_machine, "copy_memory", slow) if dist.get_rank() else nullcontext():
        if dist.get_rank() == 0:
            wait_until_said("rank 1 reads")
            meanwhile()
            say("rank 0 has gone on")
        yield
        dist.barrier()
    for key in ("rank 1 reads", "rank 0 has gone on") if dist.get_rank() == 0 else ():
        dist.distributed_c10d._get_default_store().delete_key(key)
    dist.barrier()


@pytest.mark.parametrize("freed", [False, True])
@on_ranks(2)
def test_memory_that_changes_when_there_is_a_copy_is_read_from_the_copy(freed):
    """Rank 1 is reading when rank 0 leaves a copy, and goes on."""
    numel = 1 << 20
    tensor = torch.frombuffer(mmap.mmap(-1, 4 * numel), dtype=torch.float32).copy_(mine(numel))
    expected = mine(numel, of=1 - dist.get_rank())
    loan, fetch, found = lend(tensor)

    def go_on() -> None:
        loan.wait()
        assert loan.is_copy
        tensor.zero_()
        if freed:  # what the system has taken back nobody can read. An allocator may keep it.
            allow(tensor, 0)

    with slowly(go_on):
        if dist.get_rank():
            fetch.wait()
            assert torch.equal(found, expected)
            assert os.fstat(loan.neighbor.theirs.file).st_blocks < 100  # the copy is freed
    allow(tensor, mmap.PROT_READ | mmap.PROT_WRITE)
    assert loan.is_read() == (dist.get_rank() == 0)
    same_machine.leave(loan.message.group)


def allow(tensor: torch.Tensor, access: int) -> None:
    """Who may do what with the memory of a tensor, which has whole pages of its own."""
    libc, address = ctypes.CDLL(None), ctypes.c_void_p(tensor.data_ptr())
    assert libc.mprotect(address, ctypes.c_size_t(tensor.nbytes), access) == 0


@on_ranks(2)
def test_what_is_given_up_is_not_read():
    """Its place may be in use for something else by then."""
    loan, fetch, found = lend(mine(4))
    fetch.drop()
    assert not fetch.read_if_lent() and not found.any()
    dist.barrier()
    same_machine.leave(loan.message.group)


@on_ranks(2)
def test_what_a_rank_has_lent_before_it_left_is_found():
    """It may lend the last message, and leave, between two looks of this rank."""
    loan, _, _ = lend(mine(4))
    looks = iter([False, False, True, True])
    with patch.object(same_machine.Neighbor, "_gone", lambda neighbor: "it has left"):
        loan.neighbor.wait_until(lambda: next(looks))
        with pytest.raises(same_machine.RankLost, match="it has left"):
            loan.neighbor.wait_until(lambda: False)
    dist.barrier()
    same_machine.leave(loan.message.group)


@on_ranks(2)
def test_memory_of_a_rank_that_leaves_is_never_taken_for_what_it_has_lent():
    """After an exception, say, in the middle of a step: there is no copy."""
    tensor = mine(4)
    loan, fetch, _ = lend(tensor)

    def leave() -> None:
        same_machine.leave(loan.message.group)
        tensor.zero_()

    with slowly(leave):
        if dist.get_rank():
            with pytest.raises(same_machine.RankLost, match="left it while its memory was read"):
                fetch.read_if_lent()
            with pytest.raises(same_machine.RankLost, match="this rank or rank 0 of the group has"):
                fetch.wait()  # and not once more
    same_machine.leave(loan.message.group)


@on_ranks(2)
def test_a_copy_is_read_although_its_lender_has_left():
    tensor = mine(4)
    loan, fetch, found = lend(tensor)
    if dist.get_rank() == 0:
        loan.wait()
        same_machine.leave(loan.message.group)
        tensor.zero_()
        del loan, fetch
        gc.collect()
    dist.barrier()
    if dist.get_rank() == 1:
        fetch.wait()
        assert torch.equal(found, mine(4, of=0))
        same_machine.leave(loan.message.group)
    dist.barrier()


@on_ranks(2)
def test_nothing_is_lent_by_a_rank_that_has_left():
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    same_machine.leave(group)
    with pytest.raises(same_machine.RankLost, match="this rank has left the group"):
        same_machine.Loan(neighbor, [mine(1)], Message(group, 5, Kind.OTHER, 4, ""))
    assert not neighbor.loans
    dist.barrier()


@on_ranks(2)
def test_two_threads_make_one_copy():
    """When the first has made it the memory may change, and the second must not copy that."""
    loan, _, _ = lend(mine(4))
    write, begun = loan.neighbor.own.write_copy, []

    def slow(*arguments) -> None:
        begun.append(arguments)
        time.sleep(0.05)
        write(*arguments)

    with patch.object(loan.neighbor.own, "write_copy", slow):
        threads = [threading.Thread(target=loan.wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(begun) == 1 and loan.is_copy
    dist.barrier()
    same_machine.leave(loan.message.group)


@on_ranks(2)
def test_a_message_that_two_threads_wait_for_is_read_once():
    """Who uses it may change it when it has come, and the other one must not write to it then."""
    _, fetch, found = lend(mine(4))
    copy, copied = same_machine.copy_memory, []

    def slow(*arguments) -> None:
        copied.append(arguments)
        time.sleep(0.05)
        copy(*arguments)

    with patch.object(same_machine, "copy_memory", slow):
        threads = [threading.Thread(target=fetch.wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(copied) == 1 and torch.equal(found, mine(4, of=1 - dist.get_rank()))
    dist.barrier()

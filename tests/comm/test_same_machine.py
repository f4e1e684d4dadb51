"""same_machine.py: loans, and what becomes of them if a rank does not come."""

import os
import time
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import deadlock_watch, same_machine
from minifsdp.comm.collectives import all_gather, reduce_scatter
from minifsdp.comm.message_tags import Kind, Message
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
    with pytest.raises(RuntimeError, match=r"rank \d has 16 bytes where 20 are expected"):
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
    if dist.get_rank() == 0:
        finish()  # and not on rank 1
    dist.barrier()
    same_machine.leave(group)
    (neighbor,) = same_machine.neighbors[group].values()
    assert not neighbor.loans
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
def test_who_has_ended_will_not_read():
    """Where a rank waits to be read it goes on. It hears of the end where it wants something."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    message = Message(group, 5, Kind.OTHER, 4, "message 5")
    loan = same_machine.Loan(neighbor, [mine(1)], message)
    neighbor.process = ended_process()
    assert loan.is_read() and not neighbor.loans


@on_ranks(2)
def test_loans_may_be_given_up_while_one_of_them_is_looked_at():
    """By the thread of deadlock_watch.py, when it closes the group."""
    group = near()
    (neighbor,) = same_machine.neighbors[group].values()
    loan = same_machine.Loan(neighbor, [mine(1)], Message(group, 5, Kind.OTHER, 4, ""))

    def closed_meanwhile(_: int) -> list[int]:
        same_machine.leave(group)
        return [loan.serial] * 4

    with patch.object(neighbor, "line", closed_meanwhile):
        assert loan.is_read()
    dist.barrier()


def test_a_rank_that_has_left_is_not_waited_for():
    text, _ = alone_in_the_world(left)
    assert "in the gather of the parameters of unit 'block'" in text
    assert "rank 1 of the group has left it" in text


def ended_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def ended() -> str:
    """Rank 1 does not take part; for rank 0 it is a process that has ended."""
    group = near()
    if dist.get_rank() == 1:
        return ""
    same_machine.neighbors[group][1].process = ended_process()
    with pytest.raises(RuntimeError) as error:
        all_gather(torch.empty(8), mine(4), group, 7, "'block'")()
    return str(error.value)


def test_a_rank_that_has_ended_is_not_waited_for():
    text, _ = alone_in_the_world(ended)
    assert "rank 0 waited in the gather of the parameters of unit 'block'" in text
    assert "cannot be read: No such process" in text

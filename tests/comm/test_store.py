"""store.py: what ranks tell each other through the store."""

from unittest.mock import patch

import pytest
import torch.distributed as dist

from minifsdp.comm import deadlock_watch, store
from minifsdp.comm.store import exchange
from tests.comm.test_deadlock_watch import alone_in_the_world
from tests.ranks import on_ranks


@on_ranks(3)
def test_the_first_rank_judges_and_all_hear_it():
    judged = []

    def judge(said):
        judged.append(said)
        return sum(said)

    for turn in range(3):  # notes of one turn are not those of the next
        assert exchange(dist.group.WORLD, "numbers", dist.get_rank() + turn, judge) == 3 + 3 * turn
    assert len(judged) == (3 if dist.get_rank() == 0 else 0)
    assert judged[:1] == ([[0, 1, 2]] if dist.get_rank() == 0 else [])
    assert deadlock_watch.waiting is None


@on_ranks(4)
def test_groups_do_not_hear_each_other_and_the_first_rank_is_the_groups():
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    first = dist.get_rank() // 2 * 2
    assert exchange(pair, "", dist.get_rank(), list) == [first, first + 1]


@on_ranks(2)
def test_ranks_may_hold_different_groups_of_the_same_ranks():
    groups = [dist.new_group(), dist.new_group()]
    assert exchange(groups[dist.get_rank()], "", dist.get_rank(), list) == [0, 1]


@on_ranks(2)
def test_notes_are_not_left_in_the_store():
    exchange(dist.group.WORLD, "", "note", list)
    dist.barrier()
    groups_store = dist.distributed_c10d._get_default_store()
    before = groups_store.num_keys()
    dist.barrier()  # else a fast rank's next note is among those counted
    exchange(dist.group.WORLD, "", "note", list)
    dist.barrier()
    assert (
        groups_store.num_keys() == before + 1
    )  # what was made of them, which others may still read


def nobody_comes():
    if dist.get_rank():
        with (
            patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
            pytest.raises(RuntimeError) as error,
        ):
            deadlock_watch.watch([dist.group.WORLD])
            exchange(dist.group.WORLD, "something", None, list)
        return str(error.value)
    with patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2), pytest.raises(RuntimeError):
        deadlock_watch.watch([dist.group.WORLD])
        dist.barrier()
    return "had gone on"


def test_who_waits_for_a_note_in_vain_is_told():
    first, said = alone_in_the_world(nobody_comes)
    assert first == "had gone on"
    assert "rank 0: in torch.distributed.barrier()" in said
    assert "rank 1: in something with the ranks [0, 1]" in said


@on_ranks(2)
def test_a_wait_without_end_has_one():
    groups_store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with patch.object(store.time, "monotonic", iter([0, 0, 10**9]).__next__):
            message = store.Message(dist.group.WORLD, 0, store.Kind.OTHER, 1, "the test")
            with pytest.raises(RuntimeError, match=r"waited in the test.*nobody came in time"):
                store._read(groups_store, "a key that nobody sets", message)

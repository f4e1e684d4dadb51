"""consensus.py: ranks compare what they have, and come to the same result."""

import threading
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from minifsdp.comm import consensus, deadlock_watch
from minifsdp.comm.consensus import (
    first_problem,
    gather_numbers,
    gather_objects,
    groups_with_peers,
)
from minifsdp.comm.message_tags import Kind, Message
from minifsdp.sim import cluster
from tests.comm.test_deadlock_watch import alone_in_the_world
from tests.parity import alone
from tests.ranks import device, on_ranks, run


@on_ranks(3)
def test_the_first_rank_judges_and_all_get_its_result():
    judged = []

    def judge(own, agreed):
        judged.append((own, agreed))
        return sum(own)

    world, rank = dist.group.WORLD, dist.get_rank()
    for turn in range(3):  # notes of one turn are not those of the next
        assert consensus.consensus([world], "numbers", rank + turn, -rank, judge) == 3 + 3 * turn
    assert len(judged) == (3 if rank == 0 else 0)
    assert judged[:1] == ([([0, 1, 2], [0, -1, -2])] if rank == 0 else [])
    assert not deadlock_watch.waiting


def rows_and_columns():
    """This rank's row and column, of a grid of two by two."""
    lines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return lines[dist.get_rank() // 2], lines[2 + dist.get_rank() % 2]


@pytest.mark.parametrize("odd", range(4))
@on_ranks(4)
def test_in_a_grid_all_ranks_hear_of_the_problem_of_one(odd):
    problem = "a problem" if dist.get_rank() == odd else None
    groups = rows_and_columns()
    assert first_problem(groups, "problems", problem) == "a problem"
    assert first_problem(groups, "problems", None) is None


@on_ranks(4)
def test_in_a_grid_all_ranks_hear_the_numbers_of_all():
    rank = dist.get_rank()
    said = gather_numbers(rows_and_columns(), [rank, 5], device(), 7, "numbers", Kind.MOMENT)
    assert said == {r: [r, 5] for r in range(4)}


@on_ranks(4)
def test_groups_do_not_hear_each_other_and_the_first_rank_is_the_groups():
    row, _ = rows_and_columns()
    first = dist.get_rank() // 2 * 2
    assert gather_objects(dist.get_rank(), row) == [first, first + 1]


@on_ranks(2)
def test_ranks_may_hold_different_groups_of_the_same_ranks():
    groups = [dist.new_group(), dist.new_group()]
    assert gather_objects(dist.get_rank(), groups[dist.get_rank()]) == [0, 1]


def gather_long_objects():
    rank = dist.get_rank()
    mine = {"rank": rank, "text": "é" * 1000 * rank, "dtype": torch.float32, "none": None}
    for theirs, found in enumerate(gather_objects(mine, dist.group.WORLD)):
        assert found == {**mine, "rank": theirs, "text": "é" * 1000 * theirs}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_objects_of_each_however_long(world_size):
    run(gather_long_objects, world_size)


@on_ranks(2)
def test_groups_of_one_rank_have_no_peers():
    assert groups_with_peers([None, alone(), dist.group.WORLD]) == [dist.group.WORLD]
    with patch.object(consensus, "_ask_all", None):
        assert first_problem([alone()], "problems", "mine") == "mine"


def test_ranks_that_are_simulated_never_answer():
    with cluster(nodes=1, gpus_per_node=2, kind="cpu"):
        assert dist.get_world_size() == 2 and groups_with_peers([dist.group.WORLD]) == []


@on_ranks(2)
def test_notes_are_not_left_in_the_store():
    gather_objects("note", dist.group.WORLD)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    dist.barrier()  # else a fast rank's next note is among those counted
    for _ in range(3):
        gather_objects("note", dist.group.WORLD)
    dist.barrier()
    assert store.num_keys() == before  # the last result, in place of the one before


def nobody_comes(about):
    with (
        patch.multiple(deadlock_watch, POLL=0.05, PATIENCE=2),
        pytest.raises(RuntimeError) as error,
    ):
        deadlock_watch.watch([dist.group.WORLD])
        if dist.get_rank() or about:
            gather_objects(None, dist.group.WORLD, about or "something")
        else:
            dist.barrier()
    return str(error.value)


def test_a_rank_that_waits_for_a_note_in_vain_is_told():
    _, error = alone_in_the_world(nobody_comes, "")
    assert "rank 0: in torch.distributed.barrier()" in error
    assert "rank 1: in something with the ranks [0, 1]" in error


def compare_different_things():
    return nobody_comes(f"thing {dist.get_rank()}")


def test_notes_about_different_things_are_not_taken_for_each_other():
    for error in alone_in_the_world(compare_different_things):
        assert "rank 0: in thing 0 with the ranks [0, 1]" in error
        assert "rank 1: in thing 1 with the ranks [0, 1]" in error


@on_ranks(2)
def test_a_wait_without_end_has_one():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with patch.object(consensus.time, "monotonic", iter([0, 0, 10**9]).__next__):
            message = Message(dist.group.WORLD, 0, Kind.OTHER, 1, "the test")
            with pytest.raises(RuntimeError, match=r"waited in the test.*nobody came in time"):
                consensus._read(store, "a key that nobody sets", message)


@on_ranks(2)
def test_what_a_rank_has_said_where_others_did_not_come_is_forgotten():
    rank, group, about = dist.get_rank(), dist.group.WORLD, "a comparison of ranks that part"
    if rank:

        def end():
            while not deadlock_watch.waiting:
                time.sleep(0.01)
            (message,) = deadlock_watch.waiting.values()
            message.verdict = "they have parted"

        threading.Thread(target=end).start()
        with pytest.raises(RuntimeError, match="they have parted"):
            gather_objects("old", group, about)
    dist.barrier()
    if rank:
        time.sleep(0.3)  # the other one looks for it meanwhile
    assert gather_objects(f"new {rank}", group, about) == ["new 0", "new 1"]

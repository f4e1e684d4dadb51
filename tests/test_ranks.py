"""ranks.py: the harness itself. A test that cannot fail is worth nothing; one that hangs, less."""

import ctypes
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests import patience, ranks
from tests.gpus import Place
from tests.patience import Patience
from tests.ranks import RankFailure, _worlds, on_ranks, run


def succeed(value):
    return dist.get_rank(), dist.get_world_size(), os.getpid(), value


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"wrong on rank {rank}")


def fail_and_leave_the_others_waiting():
    if dist.get_rank() == 0:
        raise ValueError("wrong on rank 0")
    dist.all_reduce(torch.zeros(1, device=ranks.device()))


def crash_on(rank):
    if dist.get_rank() == rank:
        ctypes.string_at(0)


def hang_on(rank):
    while dist.get_rank() == rank:
        time.sleep(0.01)


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_it_and_the_results_come_by_rank(world_size):
    results = run(succeed, world_size, "x")
    assert [result[:2] for result in results] == [(rank, world_size) for rank in range(world_size)]
    assert {result[3] for result in results} == {"x"}


def test_processes_are_used_again():
    first, second = run(succeed, 2, 1), run(succeed, 2, 2)
    assert [result[2] for result in first] == [result[2] for result in second]


def is_stopped(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def are_stopped(processes):
    """On a busy machine that takes a while: each of them has to get its turn."""
    patience = Patience(10)
    while patience.left and not all(map(is_stopped, processes)):
        time.sleep(0.01)
        patience.count()
    return all(map(is_stopped, processes))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux alone")
def test_the_world_that_was_called_last_is_the_only_one_that_is_not_stopped():
    if ranks.place_of(2) is Place.GPU:
        pytest.skip("ranks with GPUs are not stopped")
    two = [result[2] for result in run(succeed, 2, 1)]
    assert not any(map(is_stopped, two))
    three = [result[2] for result in run(succeed, 3, 1)]
    assert are_stopped(two) and not any(map(is_stopped, three))
    assert [result[2] for result in run(succeed, 2, 2)] == two
    assert are_stopped(three)


def signal_at_the_end_of_the_server():
    signal_number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number))  # PR_GET_PDEATHSIG
    return signal_number.value


@pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped on Linux alone")
def test_ranks_that_are_stopped_end_when_the_server_does():
    assert run(signal_at_the_end_of_the_server, 2) == [signal.SIGKILL] * 2


def test_the_server_imports_tests_with_ranks_and_no_others():
    ranks.fork_server()
    known = multiprocessing.forkserver._forkserver._preload_modules
    assert {"torch", __name__} <= {*known} and "tests.patience" not in known


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_any_rank_fails_and_tells_of_all(rank):
    with pytest.raises(RankFailure) as error:
        run(fail_on, 2, rank)
    assert f"rank {rank} failed:\nTraceback" in str(error.value)
    assert f"ValueError: wrong on rank {rank}" in str(error.value)
    assert f"rank {1 - rank} finished" in str(error.value)
    run(succeed, 2, "afterwards")


def fail_with_something_under_way():
    if dist.get_rank() == 0:
        dist.isend(torch.ones(1, device=ranks.device()), 1)
    raise ValueError("all of them")


def first_message():
    message = torch.zeros(1, device=ranks.device())
    if dist.get_rank() == 0:
        dist.send(message + 2, 1)
    else:
        dist.recv(message, 0)
    return os.getpid(), message.item()


def test_where_all_ranks_have_failed_they_go_on_and_nothing_is_left_of_it():
    before = [result[2] for result in run(succeed, 2, "x")]
    with pytest.raises(RankFailure, match="all of them"):
        run(fail_with_something_under_way, 2)
    assert run(first_message, 2) == [(before[0], 0), (before[1], 2)]


def leave_groups_behind():
    for _ in range(ranks.MANY + 2):  # the last one's threads may not have their names yet
        dist.new_group()
    return os.getpid()


def zeros_on(backend):
    """Make a DTensor by an operation of torch's, in a group of its own, which ends."""
    group = dist.new_group(backend=backend)
    mesh = DeviceMesh.from_group(group, "cpu")
    zeros = torch.zeros_like(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    if "cpu" in backend:
        assert zeros.full_tensor().shape == (4,)
    dist.barrier()  # the other rank is still joining it, perhaps
    dist.destroy_process_group(group)


def test_dtensors_do_not_meet_the_groups_of_the_last_test():
    run(zeros_on, 2, "cuda:gloo")
    run(zeros_on, 2, "cpu:gloo")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads")
def test_ranks_end_whose_process_groups_are_many():
    before = run(leave_groups_behind, 2)
    assert set(before).isdisjoint(result[2] for result in run(succeed, 2, "afterwards"))


def test_those_left_waiting_say_where(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    with pytest.raises(RankFailure) as error:
        run(fail_and_leave_the_others_waiting, 2, timeout=1e9)  # it does not take as long as that
    assert "rank 1 did not finish" in str(error.value)
    assert "in fail_and_leave_the_others_waiting" in str(error.value)
    run(succeed, 2, "afterwards")


def test_a_hang_ends_at_the_limit_with_its_stack():
    with pytest.raises(RankFailure) as error:
        run(hang_on, 2, 1, timeout=1.0)
    assert "rank 1 did not finish (limit 1 s)" in str(error.value)
    assert "in hang_on" in str(error.value) and "rank 0 finished" in str(error.value)
    run(succeed, 2, "afterwards")


def test_the_limit_is_in_seconds_of_an_idle_machine(monkeypatch):
    """On a busy one everything takes longer, and still nothing hangs."""
    monkeypatch.setattr(patience, "INTERVAL", 0.1)
    monkeypatch.setattr(patience, "share_of_a_core", lambda: 0.001)
    run(time.sleep, 2, 0.5, timeout=0.2)
    monkeypatch.setattr(patience, "share_of_a_core", lambda: 1.0)
    with pytest.raises(RankFailure, match="did not finish"):
        run(time.sleep, 2, 1000, timeout=0.2)


def test_a_machine_that_was_suspended_has_not_waited(monkeypatch):
    """The clock goes on meanwhile, and the ranks do not."""
    monkeypatch.setattr(patience, "share_of_a_core", lambda: 1.0)
    limit = patience.Patience(60)
    limit._counted -= 1000
    limit.count()
    assert 57 < limit.left < 59


def test_the_start_of_its_processes_is_not_part_of_a_tests_time(monkeypatch):
    limits = []

    def patience_of(seconds):
        limits.append(seconds)
        return patience.Patience(seconds)

    monkeypatch.setattr(ranks, "Patience", patience_of)
    world = _worlds.pop((1, ranks.place_of(1)), None)
    if world is not None:
        world.kill()
    run(succeed, 1, timeout=50, value="at once")
    run(succeed, 1, timeout=40, value="and again")
    assert limits == [ranks.START, 50, 40]  # each limit counts for one wait alone


def test_a_program_that_hangs_is_ended_and_what_others_print_is_kept(monkeypatch):
    monkeypatch.setattr(patience, "INTERVAL", 0.05)
    talk = "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(0.2)"
    result = patience.run_command([sys.executable, "-c", talk])
    assert (result.returncode, result.stdout, result.stderr) == (0, "out\n", "err\n")
    with pytest.raises(subprocess.TimeoutExpired):
        patience.run_command([sys.executable, "-c", "while True: pass"], seconds=0.2)


def test_a_killed_rank_fails_its_test_and_the_next_one_runs():
    with pytest.raises(RankFailure, match="rank 1 failed:\ndied with exit code -9"):
        run(die_on, 2, 1)
    run(succeed, 2, "afterwards")


def test_of_a_rank_that_crashes_it_is_said_where():
    crash = r"died with exit code -11\nFatal Python error: Segmentation fault(.|\n)* in crash_on"
    with pytest.raises(RankFailure, match=f"rank 1 failed:\n{crash}"):
        run(crash_on, 2, 1)


@on_ranks(2)
def test_the_decorator_runs_the_body_in_a_group():
    assert dist.get_world_size() == 2


def skip():
    pytest.skip("because")


def test_a_monkeypatch_is_refused_since_ranks_would_keep_its_changes(monkeypatch):
    @on_ranks(2)
    def changes(monkeypatch):
        monkeypatch.setenv("MINIFSDP_LEFT_BEHIND", "1")

    for call in (partial(changes, monkeypatch), partial(changes, monkeypatch=monkeypatch)):
        with pytest.raises(TypeError, match=r"use unittest\.mock\.patch"):
            call()


def test_skipping_reaches_pytest():
    with pytest.raises(pytest.skip.Exception, match="because"):
        run(skip, 2)

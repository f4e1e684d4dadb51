"""sim/hardware/clock.py: a host, and streams that do later what it says."""

from minifsdp.sim.hardware.clock import Clock


def test_a_stream_does_one_thing_after_the_other_and_not_before_it_is_told():
    clock = Clock()
    assert clock.launch("compute", 2.0) == (0.0, 2.0)
    clock.work(1.0)
    assert clock.launch("compute", 1.0) == (2.0, 3.0)
    clock.work(4.0)
    assert clock.launch("compute", 1.0) == (5.0, 6.0)
    assert clock.now == 5.0


def test_streams_run_beside_each_other_unless_one_waits():
    clock = Clock()
    _, gathered = clock.launch("unshard", 3.0)
    assert clock.launch("compute", 1.0) == (0.0, 1.0)
    clock.wait("compute", gathered)
    assert clock.launch("compute", 1.0) == (3.0, 4.0)
    assert clock.now == 0.0 and clock.idle_at() == 4.0


def test_the_host_waits_only_if_it_is_early():
    clock = Clock()
    assert clock.block(2.0) == 2.0 and clock.now == 2.0
    assert clock.block(1.0) == 0.0 and clock.now == 2.0


def test_a_full_queue_blocks_the_host_until_the_first_has_started():
    clock = Clock(queue=3)
    for _ in range(4):  # one runs, three wait
        clock.launch("compute", 1.0)
    assert clock.now == 0.0
    clock.launch("compute", 1.0)
    assert clock.now == 1.0
    clock.launch("unshard", 1.0)  # it has a queue of its own
    assert clock.now == 1.0


def test_a_kernel_is_slower_beside_a_collective():
    clock = Clock(beside_collectives=0.5)
    assert clock.launch_collective("unshard", 4.0) == (0.0, 4.0)
    assert clock.launch("compute", 1.0) == (0.0, 2.0)
    assert clock.launch("compute", 3.0) == (2.0, 6.0)  # one of its three in the other's last two
    assert clock.launch("compute", 1.0) == (6.0, 7.0)


def test_two_collectives_at_once_slow_it_as_one_does():
    clock = Clock(beside_collectives=0.5)
    clock.launch_collective("unshard", 3.0)
    clock.launch_collective("reduce", 4.0)
    assert clock.launch("compute", 3.0) == (0.0, 5.0)


def test_what_runs_already_is_later_by_what_it_loses():
    clock = Clock(beside_collectives=0.5)
    assert clock.launch("compute", 3.0) == (0.0, 3.0)
    clock.wait("unshard", 1.0)
    assert clock.launch_collective("unshard", 5.0) == (1.0, 6.0)
    assert clock.lane("compute").idle_at == 5.0  # two seconds beside it took twice as long
    assert clock.launch("compute", 1.0) == (5.0, 6.5)


def test_a_lane_that_only_waits_loses_nothing():
    clock = Clock(beside_collectives=0.5)
    clock.launch("compute", 1.0)
    clock.wait("compute", 4.0)
    clock.wait("unshard", 2.0)
    clock.launch_collective("unshard", 2.0)
    assert clock.lane("compute").idle_at == 4.0

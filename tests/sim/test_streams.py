"""sim/streams.py: what the engine takes for a GPU's streams and events."""

import torch

from minifsdp.sim import cluster
from minifsdp.sim.streams import make_streams
from minifsdp.sim.tape import Mark, Op, Wait


def test_events_carry_times_from_stream_to_stream_and_to_the_host():
    with cluster() as gpu:
        streams = make_streams(gpu, torch.device("meta"))
        slow = streams.unshard.submit(lambda: gpu.clock.launch("unshard", 1.0) and (lambda: None))
        assert not slow.query()
        streams.reduce.wait_event(slow)
        assert gpu.clock.lane("reduce").idle_at == gpu.clock.lane("unshard").idle_at > 1.0
        slow.wait()
        assert gpu.clock.lane("compute").idle_at > 1.0 > gpu.clock.now
        slow.synchronize()
        assert slow.query() and gpu.clock.now > 1.0
    waits = [e for e in gpu.tape if isinstance(e, Wait)]
    assert [wait.waiter for wait in waits] == ["reduce", "compute", "host"]
    assert all(isinstance(wait.mark, Mark) for wait in waits)


def test_a_wait_of_the_host_for_the_computation_is_the_limiters_whatever_file_it_is_in():
    with cluster() as gpu:
        streams = make_streams(gpu, torch.device("meta"))
        streams.compute.record_event().synchronize()
        streams.download.record_event().synchronize()  # an offloaded gradient
        streams.compute.record_event().wait()
        gpu.synchronize()
    assert [e.by_limiter for e in gpu.tape if isinstance(e, Wait)] == [True, False, False, False]


def test_what_is_submitted_runs_on_the_stream_under_its_label_and_the_host_goes_on():
    with cluster() as gpu:
        unshard = make_streams(gpu, torch.device("meta")).unshard
        before = gpu.clock.now
        event = unshard.submit(lambda: torch.ones(1 << 20) is None or (lambda: None), "a gather")
        assert gpu.clock.now >= before + gpu.cluster.moment and not event.query()
        torch.ones(3)
    first, second = [entry for entry in gpu.tape if isinstance(entry, Op)]
    assert (first.stream, first.label) == ("unshard", "a gather")
    assert (second.stream, second.label) == ("compute", "")

"""streams.py: where work runs."""

from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from minifsdp import CPUOffload, ShardingStrategy
from minifsdp.comm import collectives
from minifsdp.core.streams import BACKENDS, CpuStream, CudaStream, Streams
from tests.parity import BF16_SUMMED_IN_FP32, check_parity
from tests.ranks import on_ranks

CPU = torch.device("cpu")
OFFLOADED_BF16 = {"cpu_offload": CPUOffload(True), "mixed_precision": BF16_SUMMED_IN_FP32}


@pytest.mark.direct
def test_a_launch_starts_at_once_and_finishes_when_somebody_waits():
    log = []

    def launch():
        log.append("started")
        return lambda: log.append("finished")

    event = CpuStream().submit(launch)
    assert log == ["started"] and not event.query()
    event.wait()
    assert log == ["started", "finished"] and event.query()


@pytest.mark.direct
def test_two_may_wait_and_it_finishes_once():
    log = []
    event = CpuStream().submit(lambda: lambda: log.append("finished"))
    event.synchronize()
    event.wait()
    assert log == ["finished"]


@pytest.mark.direct
def test_one_stream_waits_for_another():
    log = []
    event = CpuStream().submit(lambda: lambda: log.append("first"))
    second = CpuStream()
    second.wait_event(event)
    second.submit(lambda: log.append("second"))
    assert log == ["first", "second"]


@pytest.mark.direct
def test_whoever_waits_gets_the_exception_and_nobody_waits_for_it_twice():
    def launch():
        def finish():
            raise ConnectionError("rank 1 is gone")

        return finish

    event = CpuStream().submit(launch)
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        event.wait()
    event.wait()


@pytest.mark.direct
def test_the_host_has_always_passed_its_own_marks():
    assert CpuStream().record_event().query()


@pytest.mark.direct
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpus(1))])
def test_each_stream_is_one_of_its_own(kind):
    made = Streams.on(torch.device(kind))
    every = [getattr(made, field.name) for field in fields(made) if field.name != "device"]
    assert len({id(stream) for stream in every}) == len(every) == 6
    assert made.host_runs_ahead == (kind == "cuda")


@pytest.mark.direct
def test_an_unknown_kind_of_device_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="on cpu and cuda; the parameters are on 'meta'"):
        Streams.on(torch.device("meta"))


class FakeCudaStream:
    """Writes down what it is asked."""

    def __init__(self, log):
        self.log = log

    def record_event(self):
        self.log.append("record")
        return SimpleNamespace(name="event", query=None, synchronize=None)

    def wait_event(self, event):
        self.log.append(f"wait for {event.name}")


@pytest.mark.direct
def test_on_cuda_launch_and_finish_are_both_queued_before_the_event():
    """What can be said of the CUDA path without a GPU: the order in which it queues its work."""
    log = []

    @contextmanager
    def current(stream):
        log.append("enter")
        yield
        log.append("leave")

    def launch():
        log.append("launch")
        return lambda: log.append("finish")

    stream = CudaStream(torch.device("cuda"), FakeCudaStream(log))
    with patch("torch.cuda.stream", current):
        event = stream.submit(launch)
    stream.wait_event(event)
    assert log == ["enter", "launch", "finish", "record", "leave", "wait for event"]


@pytest.mark.direct
def test_on_cuda_the_allocator_is_told_who_uses_a_tensor():
    log = []
    stream = FakeCudaStream(log)

    class Tensor:
        def record_stream(self, stream):
            log.append(stream)

    CudaStream(torch.device("cuda"), stream).record_stream(Tensor())
    assert log == [stream]


class PassedEvent:
    def wait(self):
        raise AssertionError("it lets the current device wait, and a model may be on another one")

    def synchronize(self):
        """Everything has happened already."""

    def query(self):
        return True


@pytest.mark.parametrize("settings", [{}, OFFLOADED_BF16], ids=["", "offload, bf16"])
@pytest.mark.parametrize("strategy", ShardingStrategy.__members__)
@on_ranks(2)
def test_the_cuda_path_trains_on_stand_ins_for_cudas_streams(strategy, settings):
    """All that runs on CUDA but CUDA: its streams' code, torch's own collectives, the engine."""

    class Stream:
        def __init__(self, device, priority=0):
            self.device = device

        def record_event(self):
            return PassedEvent()

        def wait_event(self, event):
            assert isinstance(event, PassedEvent)

    used = []
    with (
        patch("torch.cuda.Stream", Stream),
        patch("torch.cuda.current_stream", Stream),
        patch("torch.cuda.stream", nullcontext),
        patch("torch.Tensor.record_stream", lambda tensor, stream: used.append(stream)),
        patch.dict(BACKENDS, cpu=BACKENDS["cuda"]),
        patch.object(collectives, "NATIVE", True),
    ):
        for name in ("transformer", "mlp_nested", "odd"):
            check_parity(
                name,
                sharding_strategy=ShardingStrategy[strategy],
                forward_prefetch=True,
                **settings,
            )
    assert bool(used) == (strategy != "NO_SHARD" or bool(settings))


@pytest.mark.direct
def test_on_cuda_what_is_collective_does_not_queue_behind_the_kernels_it_runs_beside():
    made = []

    def new(device, priority):
        made.append(priority)

    with patch("torch.cuda.Stream", new):
        Streams.on(torch.device("cuda"))
    assert made == [-1] * 5  # all but the compute stream, which is whatever is current


@pytest.mark.gpus(1)
def test_on_a_gpu_the_host_runs_ahead_and_an_event_orders_two_streams():
    on_gpu = Streams.on(torch.device("cuda", 0))
    x = torch.zeros(1000, device="cuda")
    x.add_(0)  # the first time, CUDA loads the kernel, and the host waits for that

    def launch():
        torch.cuda._sleep(1_000_000_000)
        x.add_(1)
        return lambda: None

    event = on_gpu.unshard.submit(launch)
    assert not event.query()
    event.wait()
    y = x * 2
    assert (y == 2).all()


@pytest.mark.gpus(1)
def test_on_a_gpu_memory_in_use_on_another_stream_is_not_handed_out():
    on_gpu = Streams.on(torch.device("cuda", 0))
    kept = []

    def launch():
        kept.append(torch.ones(1 << 20, device="cuda"))
        return lambda: None

    on_gpu.unshard.submit(launch).wait()
    kept[0].sum(), torch.zeros(1, device="cuda")  # the first time, the host waits for kernels
    torch.cuda._sleep(1_000_000_000)
    total = kept[0].sum()  # on the compute stream, after the sleep
    on_gpu.compute.record_stream(kept[0])
    address = kept.pop().data_ptr()

    def again():
        kept.append(torch.zeros(1 << 20, device="cuda"))
        return lambda: None

    on_gpu.unshard.submit(again)
    assert kept[0].data_ptr() != address
    assert total == 1 << 20

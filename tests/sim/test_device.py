"""sim/device.py: what operators cost on a virtual GPU, and what memory they take."""

import pytest
import torch
from torch import nn

from minifsdp.sim import cluster
from minifsdp.sim.allocator import MiB
from minifsdp.sim.tape import Mark, Op, Use, Wait

KINDS = pytest.mark.parametrize("kind", ["meta", "cpu"])


def ops(gpu, stream=None) -> list[Op]:
    return [e for e in gpu.tape if isinstance(e, Op) and stream in (None, e.stream)]


@KINDS
def test_an_operator_is_launched_by_the_host_and_runs_later(kind):
    with cluster(kind=kind) as gpu:
        x = torch.zeros(1024, 1024)
        gpu.tape.clear()
        y = x @ x
        y.add_(1)
    product, sum_ = ops(gpu)
    assert (product.name, sum_.name) == ("mm", "add_")
    assert product.flops == 2 * 1024**3 and sum_.flops == 0
    assert product.start >= product.launched and sum_.start == product.end
    assert sum_.launched == pytest.approx(product.launched + gpu.cluster.launch)
    assert product.reads == [gpu.buffer(x)] * 2 and product.writes == [gpu.buffer(y)]


@KINDS
def test_memory_lives_as_long_as_the_last_tensor_that_shares_it(kind):
    with cluster(kind=kind) as gpu:
        x = torch.ones(4 * MiB)
        assert gpu.allocator.allocated.now == 16 * MiB
        view = x[1:]
        del x
        assert gpu.allocator.allocated.now == 16 * MiB
        del view
        assert gpu.allocator.allocated.now == 0


@KINDS
def test_what_autograd_saves_is_memory_until_the_backward(kind):
    with cluster(kind=kind) as gpu:
        x = torch.ones(4 * MiB, requires_grad=True)
        y = x.sin().sum()  # needs x; sin's result is needed by nobody
        before = gpu.allocator.allocated.now
        z = x.exp().sum()  # needs its own result
        assert gpu.allocator.allocated.now - before == 16 * MiB + 512
        z.backward()
        assert gpu.allocator.allocated.now - before == 16 * MiB + 512  # now it is the gradient
        del y, z
        assert gpu.allocator.allocated.now == 32 * MiB


@KINDS
def test_a_storage_that_is_shrunk_gives_its_memory_back(kind):
    with cluster(kind=kind) as gpu:
        x = torch.empty(4 * MiB)
        x.untyped_storage().resize_(0)
        assert gpu.allocator.allocated.now == 0
        x.untyped_storage().resize_(16 * MiB)
        assert gpu.allocator.allocated.now == 16 * MiB
        del x
        assert gpu.allocator.allocated.now == 0


@KINDS
def test_views_and_empty_tensors_are_no_work(kind):
    with cluster(kind=kind) as gpu:
        x = torch.empty(8, 8)
        x.view(64), x.t(), x[0], x.detach(), torch.empty_like(x)
    assert ops(gpu) == []


def test_asking_for_a_value_makes_the_host_wait():
    with cluster() as gpu:
        x = torch.ones(16 * MiB)
        x.add_(1)
        assert gpu.clock.now < gpu.clock.idle_at()
        assert x.sum().item() == 1.0  # there is none; one is as good as any
        assert gpu.clock.now == gpu.clock.idle_at()
    with cluster(kind="cpu") as gpu:
        assert torch.ones(3).sum().item() == 3.0


def test_the_cpu_is_the_host_of_a_gpu_without_values():
    with cluster() as gpu:
        x = torch.ones(4 * MiB)
        y = x.to("cpu")
        assert y.device.type == "cpu" and gpu.buffer(y).owner == "host"
        assert gpu.allocator.allocated.now == 16 * MiB
        assert gpu.clock.now == gpu.clock.idle_at()  # it has waited for the copy
        before = gpu.clock.idle_at()
        y.mul_(2)  # by the host itself
        assert gpu.clock.idle_at() == before < gpu.clock.now
        assert y.to("meta").is_meta
    assert [op.stream for op in ops(gpu)] == ["compute", "compute", "host", "compute"]


def test_work_goes_to_the_stream_that_is_current_and_takes_its_memory_there():
    with cluster() as gpu:
        with gpu.on("unshard", "a label"):
            x = torch.ones(4 * MiB)
        torch.ones(3)
        gpu.record_use(x, "compute")
    first, second = ops(gpu)
    assert (first.stream, first.label) == ("unshard", "a label")
    assert (second.stream, second.label) == ("compute", "")
    assert gpu.buffer(x).owner == "unshard"
    (use,) = [e for e in gpu.tape if isinstance(e, Use)]
    assert (use.buffer, use.stream) == (gpu.buffer(x), "compute")
    assert use.why.startswith("test_device.py:")


def test_events_carry_times_from_stream_to_stream_and_to_the_host():
    with cluster() as gpu:
        streams = gpu.streams(torch.device("meta"))
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


@KINDS
def test_an_ordinary_model_trains_without_knowing(kind):
    with cluster(kind=kind) as gpu:
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        levels = []
        for _ in range(4):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gpu.step()
            levels.append(gpu.allocator.allocated.now)
    assert levels[1] == levels[2] == levels[3]  # no leak
    assert gpu.report()["flops"] > 0
